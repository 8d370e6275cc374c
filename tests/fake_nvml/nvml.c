/* Stands in for libnvidia-ml.so.1 where LD_LIBRARY_PATH leads here: answers what the file named by FAKE_NVML_STATE says.
 *
 * Lines "init 9" (an error of nvmlInit), "hang 1", "crash 1", "print 1" (in nvmlInit), "lost 1" (the second GPU's error),
 * and of every GPU: "find 6", "ask 15" (an error of finding it, or of asking it), "ask_hangs 1", "ask_crashes 1", "ecc 3",
 * "no_ecc 1", "remapped 2", "pending 1", "failed 1", "retiring 1", "throttle 64". "ecc_other 3" is of all
 * but the first one.
 *
 * Of the memory in MiB: "used 600", "used_other 600", "used_third 600", "used_error 9"; and of the processes that use it
 * "pid 4711", "pid_mib 1024", "unknown_pid 4712" (how much is not known), "no_processes 1". */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static unsigned long long said(const char *name) {
    char word[64];
    unsigned long long value, found = 0;
    FILE *file = fopen(getenv("FAKE_NVML_STATE"), "r");
    if (file == NULL) return 0;
    while (fscanf(file, "%63s %llu", word, &value) == 2)
        if (strcmp(word, name) == 0) found = value;
    fclose(file);
    return found;
}

int nvmlInit_v2(void) {
    if (said("crash")) abort();
    if (said("print")) { printf("{\"facts\": {\"absent\": true}}\n"); fflush(stdout); }
    while (said("hang")) sleep(60);
    return (int)said("init");
}

int nvmlSystemGetDriverVersion(char *text, unsigned length) { snprintf(text, length, "580.1"); return 0; }

const char *nvmlErrorString(int code) {
    return code == 9 ? "Driver Not Loaded" : code == 15 ? "GPU is lost" : code == 3 ? "Not Supported" :
           code == 6 ? "Not Found" : code == 16 ? "GPU requires reset" : "Unknown Error";
}

static char first, other, third;

int nvmlDeviceGetHandleByPciBusId_v2(const char *name, void **device) {
    *device = strncmp(name, "0000:3b", 7) == 0 ? &first : &other;
    return strncmp(name, "0000:5e", 7) == 0 && said("lost") ? 15 : (int)said("find");
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) { *device = &other; return (int)said("find"); }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { *device = &third; return (int)said("find"); }

/* The file with ".looks" at its name's end gets a byte for each look at the memory. */
int nvmlDeviceGetMemoryInfo(void *device, unsigned long long *memory) {
    char name[4096];
    snprintf(name, sizeof name, "%s.looks", getenv("FAKE_NVML_STATE"));
    FILE *file = fopen(name, "a");
    if (file != NULL) { fputc('x', file); fclose(file); }
    memory[2] = said(device == &first ? "used" : device == &other ? "used_other" : "used_third") << 20;
    return (int)said("used_error");
}

struct process { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; };

int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, struct process *found) {
    *count = 0;
    if (said("pid")) found[(*count)++] = (struct process){(unsigned)said("pid"), said("pid_mib") << 20, 0, 0};
    if (said("unknown_pid")) found[(*count)++] = (struct process){(unsigned)said("unknown_pid"), ~0ULL, 0, 0};
    return said("no_processes") ? 3 : 0;
}

int nvmlDeviceGetTotalEccErrors(void *device, int kind, int counter, unsigned long long *count) {
    while (said("ask_hangs")) usleep(20000);
    if (said("ask_crashes")) abort();
    *count = kind == 1 && counter == 0 ? said("ecc") + (device == &other ? said("ecc_other") : 0) : 0;
    return said("no_ecc") ? 3 : (int)said("ask");
}

int nvmlDeviceGetRemappedRows(void *device, unsigned *corrected, unsigned *not, unsigned *pending, unsigned *failed) {
    *corrected = 0; *not = (unsigned)said("remapped"); *pending = (unsigned)said("pending"); *failed = (unsigned)said("failed");
    return 0;
}


/* What is asked last of each GPU: the file with ".asked" at its name's end gets a byte. */
int nvmlDeviceGetCurrentClocksThrottleReasons(void *device, unsigned long long *bits) {
    char name[4096];
    snprintf(name, sizeof name, "%s.asked", getenv("FAKE_NVML_STATE"));
    FILE *file = fopen(name, "a");
    if (file != NULL) { fputc('x', file); fclose(file); }
    *bits = 1 | said("throttle");
    return 0;
}
