package rawfd_test

import (
	"errors"
	"io"
	"runtime"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/rawfd"
	"github.com/srtm-io/srtm/internal/testkit"
)

func pair(t *testing.T) (mine, theirs int) {
	t.Helper()
	fds := testkit.Result(unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_NONBLOCK, 0)).Must(t)
	return fds[0], fds[1]
}

func TestEventsBearSlotAndGeneration(t *testing.T) {
	p := testkit.Result(rawfd.NewPoller()).Must(t)
	defer p.Close()
	mine, theirs := pair(t)
	defer unix.Close(mine)
	testkit.Must(t, p.Watch(mine, 7, 3, 0, unix.EPOLLIN))
	if got := p.Wait(false); len(got) != 0 {
		t.Fatalf("nothing happened, but %v", got)
	}
	_, err := rawfd.Send(theirs, []byte("x"))
	testkit.Must(t, err)
	for range 2 { // a level, not an edge
		if got := p.Wait(true); len(got) != 1 || got[0].Fd != 7 || got[0].Pad != 3 || got[0].Events != unix.EPOLLIN {
			t.Fatalf("events %+v", got)
		}
	}
	testkit.Must(t, p.Watch(mine, 7, 3, unix.EPOLLIN, unix.EPOLLIN|unix.EPOLLOUT|unix.EPOLLET))
	if got := p.Wait(true); len(got) != 1 || got[0].Events != unix.EPOLLIN|unix.EPOLLOUT {
		t.Fatalf("events %+v", got)
	}
	if got := p.Wait(false); len(got) != 0 {
		t.Fatalf("the edge was reported twice: %+v", got)
	}
	testkit.Must(t, p.Watch(mine, 7, 3, unix.EPOLLIN, 0))
	unix.Close(theirs)
	if got := p.Wait(false); len(got) != 0 {
		t.Fatalf("unwatched, but %+v", got)
	}
	var b [2]byte
	testkit.Result(rawfd.Receive(mine, b[:])).MustEqual(t, 1, "read")
	if _, err := rawfd.Receive(mine, b[:]); !errors.Is(err, io.EOF) {
		t.Fatalf("read at the end: %v", err)
	}
	if _, err := rawfd.Send(mine, b[:]); !errors.Is(err, unix.EPIPE) {
		t.Fatalf("write after the end: %v", err)
	}
}

// Each of several wake-ups and alarms ends one wait, although the test does not read what they leave in their
// descriptors. None of them ends a second wait.
func TestWakeAndAlarmEndAWait(t *testing.T) {
	p := testkit.Result(rawfd.NewPoller()).Must(t)
	defer p.Close()
	for range 3 {
		go p.Wake()
		p.Wait(true)
		p.Alarm(clock.Mono() + 1)
		p.Wait(true)
		p.Alarm(1) // a time long ago
		p.Wait(true)
		p.Alarm(mono.Never)
	}
	woken := make(chan struct{})
	go func() { p.Wait(true); close(woken) }()
	select {
	case <-woken:
		t.Error("a wait ended for nothing")
	default:
	}
	p.Wake()
	<-woken
}

// However many goroutines wait, others run.
func TestWaitsLeaveAProcessor(t *testing.T) {
	before := runtime.GOMAXPROCS(0)
	var all []*rawfd.Poller
	var waits sync.WaitGroup
	for range before + 2 {
		p := testkit.Result(rawfd.NewPoller()).Must(t)
		all = append(all, p)
		waits.Go(func() { p.Wait(true) })
	}
	testkit.Equal(t, runtime.GOMAXPROCS(0), len(all)+1, "GOMAXPROCS with %d pollers", len(all))
	for _, p := range all {
		p.Wake()
	}
	waits.Wait()
	for _, p := range all {
		p.Close()
	}
	if n := runtime.GOMAXPROCS(0); n != before {
		t.Errorf("GOMAXPROCS %d, before the pollers %d", n, before)
	}
}
