/* A preloaded library that tells another time of day: AHEAD s too late, or STILL for ever. */
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t id, struct timespec *now) {
  int result = syscall(SYS_clock_gettime, id, now);
  if (id == CLOCK_REALTIME) {
#ifdef STILL
    now->tv_sec = STILL;
    now->tv_nsec = 0;
#else
    now->tv_sec += AHEAD;
#endif
  }
  return result;
}
