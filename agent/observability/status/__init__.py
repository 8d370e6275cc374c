"""How a job is: the pages that an agent serves, and the report that is made of them."""
