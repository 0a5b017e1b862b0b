// Preloaded into the processes of a private cluster (`slow_timer.py`). The main thread of every Ray worker only
// waits for tasks and checks for signals, a hundred times a second. Each check wakes the thread, and a thread
// that computes loses its core and its cache for 60 to 90 us. Here the timer of this check is set to 100 ms.
//
// Affects timers of at most 10 ms that the main thread of a Ray worker sets, relative to now. In Ray 2.60 the
// check is the only one; a longer timer of that thread can become late by 90 ms when its last 10 ms begin.
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <unistd.h>

namespace {
using SetTime = int (*)(int, int, const itimerspec*, itimerspec*);

constexpr long SHORT_NS = 10'000'000, SLOW_NS = 100'000'000;

bool is_ray_worker() {
    static const bool is_one = getenv("RAY_RAYLET_PID") != nullptr;  // set by the raylet that starts it
    return is_one;
}

bool is_check_for_signals(int flags, const timespec& delay) {
    return flags == 0 && delay.tv_sec == 0 && 0 < delay.tv_nsec && delay.tv_nsec <= SHORT_NS && is_ray_worker() &&
           syscall(SYS_gettid) == getpid();
}
}  // namespace

extern "C" int timerfd_settime(int fd, int flags, const itimerspec* value, itimerspec* old) noexcept {
    static const auto next = reinterpret_cast<SetTime>(dlsym(RTLD_NEXT, "timerfd_settime"));
    itimerspec slow = *value;
    if (is_check_for_signals(flags, slow.it_value)) slow.it_value.tv_nsec = SLOW_NS;
    return next(fd, flags, &slow, old);
}
