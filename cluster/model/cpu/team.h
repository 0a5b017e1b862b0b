// How the threads of one OpenMP region share the phases of a model step.
//
// The items of a phase are cut into one run for each thread. A thread takes the items of its own run in order, so that the
// weights it reads are one stream, and then those that are left in the runs of others. A phase ends when its items are
// done, not when all threads have arrived: a thread that loses its core between two items delays no other, and finds later
// that the phases it missed are over.
//
// A thread that waits first fetches what it will read next. Then it spins, offers its core to others and at last sleeps,
// each for a bounded time: a pause inside a step costs a sleeping team no core.

#pragma once

#include <immintrin.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace {

using Clock = std::chrono::steady_clock;

// To wake a sleeping thread takes 15 to 50 us, so that long spinning costs no more than sleeping.
constexpr auto kSpin = std::chrono::microseconds(100), kOffer = std::chrono::microseconds(400);
constexpr int64_t kMaxThreads = 1024;
constexpr int64_t kFetchedLines = 4;  // between two looks at the phase

// A stretch of memory that a waiting thread fetches into its second-level cache, a little at a time.
struct Fetch {
  const char *next = nullptr, *end = nullptr;

  bool some() {
    if (next >= end) return false;
    for (int64_t line = 0; line < kFetchedLines; line++, next += 64) _mm_prefetch(next, _MM_HINT_T1);
    return true;
  }
};

// What the threads share. Used by one region at a time; `begin` comes before it.
class Team {
 public:
  void begin(int64_t threads) {
    threads_ = std::min(threads, kMaxThreads);
    done_.store(0, std::memory_order_relaxed);
    busy_.store(0, std::memory_order_relaxed);
    for (int64_t run = 0; run < threads_; run++) runs_[run].word.store(0, std::memory_order_relaxed);
  }
  int64_t threads() const { return threads_; }
  // Nanoseconds that the members of the last region spent in items, added up.
  int64_t busy() const { return busy_.load(std::memory_order_relaxed); }

 private:
  friend class Member;

  // The phase that this run was last taken from, and its next item: phase << 40 | item. When a thread comes to a phase, all
  // earlier ones are over. So a word of an earlier phase means that none of this phase has been taken.
  struct alignas(64) Run {
    std::atomic<uint64_t> word{0};
  };
  static constexpr int kItemBits = 40;

  // An item of the run that becomes the caller's, or -1.
  int64_t take(int64_t run, uint64_t phase, int64_t items) {
    const int64_t begin = items * run / threads_, end = items * (run + 1) / threads_;
    std::atomic<uint64_t>& word = runs_[run].word;
    uint64_t seen = word.load(std::memory_order_relaxed);
    for (;;) {
      const uint64_t seen_phase = seen >> kItemBits;
      const int64_t item = seen_phase < phase ? begin : (int64_t)(seen & ((1ull << kItemBits) - 1));
      if (seen_phase > phase || item >= end) return -1;
      if (word.compare_exchange_weak(seen, phase << kItemBits | (uint64_t)(item + 1), std::memory_order_relaxed))
        return item;
    }
  }

  void add_done(int64_t count, int64_t phase_end) {
    if (done_.fetch_add(count) + count != phase_end || sleepers_.load() == 0) return;
    { std::lock_guard<std::mutex> lock(mutex_); }  // a sleeper waits by now, or will see `done_`
    woken_.notify_all();
  }

  void sleep_until(int64_t phase_end) {
    std::unique_lock<std::mutex> lock(mutex_);
    sleepers_.fetch_add(1);
    woken_.wait(lock, [&] { return done_.load() >= phase_end; });
    sleepers_.fetch_sub(1);
  }

  int64_t threads_ = 1;
  alignas(64) std::atomic<int64_t> done_{0};  // items of all phases
  alignas(64) std::atomic<int64_t> sleepers_{0};
  std::atomic<int64_t> busy_{0};
  std::mutex mutex_;
  std::condition_variable woken_;
  Run runs_[kMaxThreads];
};

// One thread of the team, in its region. All members go through the same phases.
class Member {
 public:
  Member(Team& team, int64_t index) : team_(team), index_(index) {}
  ~Member() { team_.busy_.fetch_add(std::chrono::nanoseconds(busy_).count(), std::memory_order_relaxed); }

  // Runs items of the phase until none is left, then waits for those that other threads still run. One phase.
  template <class Work>
  void share(int64_t items, Fetch& fetch, Work work) {
    phase_++;
    end_ += items;
    int64_t own = 0;
    const Clock::time_point began = Clock::now();
    for (int64_t i = 0; i < team_.threads_; i++) {
      const int64_t run = (index_ + i) % team_.threads_;
      for (int64_t item; (item = team_.take(run, phase_, items)) >= 0; own++) work(item);
    }
    if (own) {
      busy_ += Clock::now() - began;
      team_.add_done(own, end_);
    }
    wait(fetch);
  }

  // Member 0, the thread that called, does it; the others wait. One phase.
  template <class Work>
  void leave_to_first(Fetch& fetch, Work work) {
    phase_++;
    end_++;
    if (index_ == 0) {
      work();
      team_.add_done(1, end_);
    }
    wait(fetch);
  }

  // The first item of this thread's own run.
  int64_t first_of(int64_t items) const { return items * index_ / team_.threads_; }
  int64_t end_of(int64_t items) const { return items * (index_ + 1) / team_.threads_; }

 private:
  bool is_over() const { return team_.done_.load(std::memory_order_acquire) >= end_; }

  void wait(Fetch& fetch) {
    while (!is_over())
      if (!fetch.some()) return wait_without_work();
  }

  void wait_without_work() {
    const Clock::time_point began = Clock::now();
    while (!is_over()) {
      const Clock::duration waited = Clock::now() - began;
      if (waited < kSpin)
        _mm_pause();
      else if (waited < kSpin + kOffer)
        sched_yield();
      else
        return team_.sleep_until(end_);
    }
  }

  Team& team_;
  const int64_t index_;
  Clock::duration busy_{};
  uint64_t phase_ = 0;
  int64_t end_ = 0;  // items of all phases up to this one
};

}  // namespace
