/* A library with the calls of NVML that the project makes, so that the real pynvml can be asked.
   Counters come from the file named by NVIDIA_STAND_IN (lines "name value"), read anew by each process. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef unsigned int u32;
typedef unsigned long long u64;

static long given(const char *name, long otherwise) {
  const char *path = getenv("NVIDIA_STAND_IN");
  FILE *file = path ? fopen(path, "r") : NULL;
  char key[64];
  long value, found = otherwise;
  while (file && fscanf(file, "%63s %ld", key, &value) == 2)
    if (!strcmp(key, name)) found = value;
  if (file) fclose(file);
  return found;
}

#define OK 0
#define NOT_SUPPORTED 3
#define INSUFFICIENT_SIZE 7
int nvmlInitWithFlags(u32 flags) { (void)flags; return (int)given("init", OK); }
int nvmlInit_v2(void) { return (int)given("init", OK); }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) { return code == 9 ? "Driver Not Loaded" : "Not Supported"; }
int nvmlSystemGetDriverVersion(char *text, u32 size) { snprintf(text, size, "580.95.05"); return OK; }
int nvmlDeviceGetCount_v2(u32 *count) { *count = (u32)given("gpus", 2); return OK; }
int nvmlDeviceGetHandleByIndex_v2(u32 index, void **device) {
  if ((long)index == given("lost", -1)) return 15;
  *device = (void *)(u64)(index + 1);
  return OK;
}
int nvmlDeviceGetUUID(void *d, char *text, u32 size) {
  snprintf(text, size, "GPU-%llu", (u64)d - 1);
  return OK;
}
int nvmlDeviceGetName(void *d, char *text, u32 size) { (void)d; snprintf(text, size, "NVIDIA A100"); return OK; }
struct pci { char old[16]; u32 domain, bus, device, id, subsystem; char bus_id[32]; };
int nvmlDeviceGetPciInfo_v3(void *d, struct pci *pci) {
  memset(pci, 0, sizeof *pci);
  snprintf(pci->bus_id, sizeof pci->bus_id, "00000000:%02llX:00.0", 0x16 + (u64)d);
  return OK;
}
int nvmlDeviceGetMigMode(void *d, u32 *now, u32 *later) { (void)d; *now = *later = 0; return OK; }
int nvmlDeviceGetTotalEccErrors(void *d, int kind, int span, u64 *count) {
  (void)d;
  *count = kind ? (span ? 7 : (u64)given("uncorrected", 0)) : (u64)given("corrected", 0);
  return OK;
}
int nvmlDeviceGetRemappedRows(void *d, u32 *c, u32 *u, u32 *pending, u32 *failed) {
  (void)d; *c = (u32)given("remapped", 0); *u = *pending = *failed = 0;
  return OK;
}
int nvmlDeviceGetRetiredPages(void *d, int cause, u32 *count, u64 *pages) {
  (void)d; (void)cause; (void)count; (void)pages;
  return NOT_SUPPORTED;
}
int nvmlDeviceGetRetiredPagesPendingStatus(void *d, int *pending) { (void)d; (void)pending; return NOT_SUPPORTED; }
int nvmlDeviceGetPcieReplayCounter(void *d, u32 *count) { (void)d; *count = (u32)given("replays", 0); return OK; }
struct violation { u64 reference, violated; };
int nvmlDeviceGetViolationStatus(void *d, int policy, struct violation *v) {
  (void)d; (void)policy;
  v->reference = 0; v->violated = 1500000000;
  return OK;
}
int nvmlDeviceGetCurrPcieLinkGeneration(void *d, u32 *v) { (void)d; *v = 4; return OK; }
int nvmlDeviceGetMaxPcieLinkGeneration(void *d, u32 *v) { (void)d; *v = 4; return OK; }
int nvmlDeviceGetCurrPcieLinkWidth(void *d, u32 *v) { (void)d; *v = (u32)given("width", 16); return OK; }
int nvmlDeviceGetMaxPcieLinkWidth(void *d, u32 *v) { (void)d; *v = 16; return OK; }
/* Only the older spelling, as a driver before 535 has it. */
int nvmlDeviceGetCurrentClocksThrottleReasons(void *d, u64 *mask) { (void)d; *mask = 4; return OK; }
struct use { u32 gpu, memory; };
int nvmlDeviceGetUtilizationRates(void *d, struct use *use) { (void)d; use->gpu = 97; use->memory = 40; return OK; }
struct memory { u64 total, free, used; };
int nvmlDeviceGetMemoryInfo(void *d, struct memory *m) {
  (void)d;
  m->total = 81920ULL << 20; m->used = 4096ULL << 20; m->free = m->total - m->used;
  return OK;
}
int nvmlDeviceGetPowerUsage(void *d, u32 *mw) { (void)d; *mw = 301500; return OK; }
int nvmlDeviceGetPowerManagementLimit(void *d, u32 *mw) { (void)d; *mw = (u32)given("limit", 300000); return OK; }
int nvmlDeviceGetPowerManagementDefaultLimit(void *d, u32 *mw) { (void)d; *mw = 300000; return OK; }
int nvmlDeviceGetMaxClockInfo(void *d, int kind, u32 *mhz) { (void)d; *mhz = kind == 1 ? 1410 : 9999; return OK; }
int nvmlDeviceGetTemperature(void *d, int sensor, u32 *t) { (void)d; (void)sensor; *t = 61; return OK; }
int nvmlDeviceGetClockInfo(void *d, int kind, u32 *mhz) { (void)d; (void)kind; *mhz = 1410; return OK; }
struct process { u32 pid; u64 memory; u32 instance, compute; };
int nvmlDeviceGetComputeRunningProcesses_v3(void *d, u32 *count, struct process *list) {
  long own = given("own", 0), other = given("other", 0);
  u32 wanted = (u32)((own != 0) + (other != 0)), filled = 0;
  (void)d;
  if (*count < wanted) { *count = wanted; return INSUFFICIENT_SIZE; }
  if (own) list[filled++] = (struct process){(u32)own, 1024ULL << 20, 0, 0};
  if (other) list[filled++] = (struct process){(u32)other, 512ULL << 20, 0, 0};
  *count = filled;
  return OK;
}
struct sample { u32 pid; u64 at; u32 sm, memory, encoder, decoder; };
int nvmlDeviceGetProcessUtilization(void *d, struct sample *list, u32 *count, u64 since) {
  (void)d;
  if (*count < 2 || !list) { *count = 2; return INSUFFICIENT_SIZE; }
  list[0] = (struct sample){(u32)given("own", 0), since + 1, 60, 0, 0, 0};
  list[1] = (struct sample){(u32)given("own", 0), since + 2, 80, 0, 0, 0};
  *count = 2;
  return OK;
}
