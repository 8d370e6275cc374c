"""The store on an etcd cluster."""
