//go:build paced

package conn

import (
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/mono"
)

// loopGather makes a loop write one message at a time, when its work is done.
const loopGather = 1

// server simulates a processor that takes pace for each message, independent of the machine's load.
// So each of several brokers on one machine has a fixed capacity. SRTM_PACE sets pace.
var server struct {
	pace time.Duration
	mu   sync.Mutex
	free mono.Time // guarded by mu: end of the work so far
}

func init() {
	var err error
	if server.pace, err = time.ParseDuration(os.Getenv("SRTM_PACE")); err != nil || server.pace <= 0 {
		panic("built with the tag paced: SRTM_PACE is the time that a message takes, such as 100us")
	}
}

// work waits until the server has worked on this many more messages. The loop blocks meanwhile.
func work(messages int) {
	server.mu.Lock()
	defer server.mu.Unlock()
	now := clock.Mono()
	if now.Sub(server.free) > server.pace { // a shorter gap is the overhead between two messages
		server.free = now
	}
	server.free = server.free.Add(time.Duration(messages) * server.pace)
	// Otherwise each sleep takes 50 us longer. An error is harmless.
	_ = unix.Prctl(unix.PR_SET_TIMERSLACK, 1, 0, 0, 0)
	for left := server.free.Sub(now); left > 0; left = server.free.Sub(clock.Mono()) {
		rest := unix.NsecToTimespec(int64(left))
		_ = unix.Nanosleep(&rest, nil) // a signal may end the sleep early
	}
}
