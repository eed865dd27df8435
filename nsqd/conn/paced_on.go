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

// loopGather: a loop writes one message after the other, each when it is worked on.
const loopGather = 1

// server is a processor that takes pace for each message, whatever else this
// machine's processors have to do: with it brokers that share them have a capacity
// each. SRTM_PACE is the pace.
var server struct {
	pace time.Duration
	mu   sync.Mutex
	free mono.Time // guarded by mu: when what came so far is done
}

func init() {
	var err error
	if server.pace, err = time.ParseDuration(os.Getenv("SRTM_PACE")); err != nil || server.pace <= 0 {
		panic("built with the tag paced: SRTM_PACE is the time that a message takes, such as 100us")
	}
}

// work returns when the server has worked on so many messages more. Its loop does
// nothing else meanwhile.
func work(messages int) {
	server.mu.Lock()
	defer server.mu.Unlock()
	now := clock.Mono()
	if now.Sub(server.free) > server.pace { // less is its way from one message to the next
		server.free = now
	}
	server.free = server.free.Add(time.Duration(messages) * server.pace)
	// Or the system sleeps for 50 us more. Where it is refused, it does.
	_ = unix.Prctl(unix.PR_SET_TIMERSLACK, 1, 0, 0, 0)
	for left := server.free.Sub(now); left > 0; left = server.free.Sub(clock.Mono()) {
		rest := unix.NsecToTimespec(int64(left))
		_ = unix.Nanosleep(&rest, nil) // a signal ends it early
	}
}
