// Allocates the pages of memory that other threads and processes write to meanwhile.

#include <sched.h>
#include <sys/resource.h>

#include <cstdint>
#include <thread>

namespace {

constexpr int64_t kPageBytes = 4096;

// Adds 0, as one operation: no byte changes, and no write of another thread is lost.
void touch(char* byte) { asm volatile("lock; addb $0, %0" : "+m"(*byte)); }

void touch_pages(char* start, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += kPageBytes) touch(start + i);
  touch(start + bytes - 1);
}

}  // namespace

extern "C" {

// One piece after the other. Subtracts the bytes of each from `left`, which other processes read. On a thread that runs
// only where a core has nothing else to do. Not by madvise: that holds the lock of the address space, and without a core
// it would hold it for long. A page fault holds its region's lock alone, which no thread of a worker waits for.
void populate(char* const* starts, const int64_t* sizes, int64_t pieces, int64_t* left) {
  std::thread([=] {
    const sched_param none = {};
    setpriority(PRIO_PROCESS, 0, 19);
    sched_setscheduler(0, SCHED_IDLE, &none);
    for (int64_t i = 0; i < pieces; i++) {
      touch_pages(starts[i], sizes[i]);
      __atomic_fetch_sub(left, sizes[i], __ATOMIC_RELAXED);
    }
  }).join();
}
}
