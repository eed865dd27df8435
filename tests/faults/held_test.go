package faults

import (
	"bytes"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
	"github.com/srtm-io/srtm/nsq/frames"
	"github.com/srtm-io/srtm/nsq/wire"
)

// The contract of a broker without a cluster. If a topic's backlog were judged only by its arrival,
// the backlog would get all its tokens during the delay.
const (
	loneRate, loneBurst = 5000, 5
	loneBackdating      = 100 * time.Millisecond
	backlog             = 1500
	heldFor             = 400 * time.Millisecond
)

// standaloneBroker is a broker without a cluster, with a topic for each policy.
type standaloneBroker struct {
	t          *testing.T
	topics     []*standalone
	data, home string
	flags      []string
	process    *local.Process

	opened mono.Time // end of the delay, apart from the broker's own lateness
}

type standalone struct {
	name, policy string
	unlimited    int // messages released before the contract
	accepted     int // including the unlimited messages
}

// start starts or restarts the broker.
func (l *standaloneBroker) start(flags ...string) {
	l.t.Helper()
	l.flags = append(l.flags, flags...)
	d, err := local.NSQD(localtest.Program(l.t, "nsqd"), l.home, append([]string{
		"--data-path=" + l.data, "--release-trace=" + l.trace(), "--log-level=warn",
		"--reject-after=10s", "--max-backdating=" + loneBackdating.String(),
	}, l.flags...)...)
	testkit.Must(l.t, err)
	l.process = d
	l.t.Cleanup(func() {
		testkit.NoError(l.t, d.Kill())
	})
}

func (l *standaloneBroker) trace() string { return filepath.Join(l.home, "releases.csv") }

// post sends an order for a topic, such as /topic/pause, and returns the status.
func (l *standaloneBroker) post(topic *standalone, route, query, body string) int {
	l.t.Helper()
	_, code, err := localtest.Ask(http.MethodPost, "http://"+l.process.HTTP+route+"?topic="+url.QueryEscape(topic.name)+query, body)
	testkit.Must(l.t, err)
	return code
}

// order sends an order for every topic.
func (l *standaloneBroker) order(route, query string) {
	l.t.Helper()
	for _, topic := range l.topics {
		testkit.MustEqual(l.t, l.post(topic, route, query, ""), http.StatusOK, "%s, topic %s%s", route, topic.name, query)
	}
}

func (l *standaloneBroker) limit() {
	l.t.Helper()
	for _, topic := range l.topics {
		topic.unlimited = topic.accepted
		contract := fmt.Sprintf("&rate=%d&burst=%d&policy=%s", loneRate, loneBurst, topic.policy)
		testkit.MustEqual(l.t, l.post(topic, "/topic/limit", contract, ""), http.StatusOK, "limit %s", topic.name)
	}
}

// publish reports whether n messages to each topic were accepted.
func (l *standaloneBroker) publish(n int, body string) (all bool) {
	l.t.Helper()
	all = true
	for _, topic := range l.topics {
		if l.post(topic, "/mpub", "", strings.Repeat(body+"\n", n)) == http.StatusOK {
			topic.accepted += n
		} else {
			all = false
		}
	}
	return all
}

// backlog publishes the backlog.
func (l *standaloneBroker) backlog() {
	l.t.Helper()
	if !l.publish(backlog, "x") {
		l.t.Fatal("the backlog is not accepted")
	}
}

// held waits for heldFor, during which nothing leaves.
func (l *standaloneBroker) held() {
	wait(heldFor)
	l.opened = clock.Mono()
}

// left waits until all accepted messages have left their topic, and checks the contracts.
func (l *standaloneBroker) left(meanwhile func()) {
	l.t.Helper()
	for _, topic := range l.topics {
		var all []testkit.Release
		for end := time.Now().Add(local.Patience); len(all) < topic.accepted; wait(20 * time.Millisecond) {
			if time.Now().After(end) {
				l.t.Fatalf("%s: %d of %d messages left in %v", topic.name, len(all), topic.accepted, local.Patience)
			}
			meanwhile()
			all = testkit.ReadTrace(l.t, l.trace(), topic.name)
		}
		l.verify(topic.name, all[topic.unlimited:])
	}
}

func (l *standaloneBroker) verify(topic string, all []testkit.Release) {
	l.t.Helper()
	// Clocks of two processes may differ, by microseconds on an idle machine.
	const unsure = loneBackdating / 2
	for _, r := range all {
		if late := r.Released.Sub(r.Eligible); late < 0 || late > loneBackdating {
			l.t.Fatalf("%s: released %v after its token, %v is the most", topic, late, loneBackdating)
		}
		if r.Arrival < l.opened && r.Eligible < l.opened.Add(-unsure) {
			l.t.Fatalf("%s: had its token %v before it was held up no longer", topic, l.opened.Sub(r.Eligible))
		}
	}
	eligible, released := testkit.Times(all)
	if _, err := testkit.Envelope(eligible, loneRate*1000, loneBurst); err != nil {
		l.t.Errorf("%s: by the times at which messages had their tokens: %v", topic, err)
	}
	allowed := loneBurst + loneRate*loneBackdating.Milliseconds()/1000
	slack, err := testkit.Envelope(released, loneRate*1000, allowed)
	if err != nil {
		l.t.Errorf("%s: by the times at which they left: %v", topic, err)
	}
	l.t.Logf("%s: %d messages under a contract, by the times at which they left they took a burst of %.0f, and %d are allowed", topic, len(released), float64(allowed)-slack, allowed)
}

// stop sends SIGSTOP, and returns when the process has stopped.
func (l *standaloneBroker) stop() {
	l.t.Helper()
	testkit.Must(l.t, l.process.Signal(syscall.SIGSTOP))
	for end := time.Now().Add(local.Patience); ; wait(time.Millisecond) {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", l.process.Pid()))
		if err != nil {
			l.t.Skipf("whether a process has stopped is not known here: %v", err)
		}
		if bytes.Contains(stat, []byte(") T ")) {
			return
		}
		if time.Now().After(end) {
			l.t.Fatalf("not stopped: %s", stat)
		}
	}
}

// mpub sends n messages to each topic over a connection, and returns a function that waits for the
// answers.
func (l *standaloneBroker) mpub(nc net.Conn, n int) (answered func()) {
	l.t.Helper()
	var out []byte
	bodies := slices.Repeat([][]byte{[]byte("x")}, n)
	for _, topic := range l.topics {
		out = wire.AppendMpub(out, topic.name, bodies)
	}
	_, err := nc.Write(out)
	testkit.Must(l.t, err)
	return func() {
		l.t.Helper()
		for _, topic := range l.topics {
			if kind, data, err := frames.Read(nc, maxFrame); kind != wire.FrameResponse || string(data) != "OK" || err != nil {
				l.t.Fatalf("MPUB to %s: %q, %v", topic.name, data, err)
			}
			topic.accepted += n
		}
	}
}

// restarted makes the backlog wait for a second process, and then for a channel.
func (l *standaloneBroker) restarted(flags ...string) {
	l.t.Helper()
	l.start(flags...)
	l.order("/topic/create", "")
	l.limit()
	l.backlog()
	testkit.Must(l.t, l.process.Stop())
	l.start()
	l.held()
	l.order("/channel/create", "&channel=c")
	l.left(func() {})
}

// Whatever else than tokens delays a broker, its later releases keep the contract, by either envelope
// and under every policy. The measurements are in the broker's release trace. The test's real-time
// waits only have to be long enough to break a contract that is kept by arrival alone.
func TestABrokerThatWasHeldUpKeepsItsContract(t *testing.T) {
	for name, run := range map[string]func(l *standaloneBroker){
		"paused": func(l *standaloneBroker) {
			l.start()
			l.order("/topic/create", "")
			l.order("/channel/create", "&channel=c")
			l.limit()
			l.order("/topic/pause", "")
			l.backlog()
			l.held()
			l.order("/topic/unpause", "")
			l.left(func() {})
		},
		"no channel": func(l *standaloneBroker) {
			l.start()
			l.order("/topic/create", "")
			l.limit()
			l.backlog()
			l.held()
			l.order("/channel/create", "&channel=c")
			l.left(func() {})
		},
		"full channel": func(l *standaloneBroker) {
			for _, topic := range l.topics {
				topic.name += "#ephemeral" // keeps the disk from taking the channel's overflow
			}
			l.start(fmt.Sprintf("--mem-queue-size=%d", backlog))
			l.order("/topic/create", "")
			l.order("/channel/create", "&channel=c")
			l.backlog()
			l.limit()
			l.backlog()
			l.held()
			l.order("/channel/empty", "&channel=c")
			l.left(func() {})
		},
		"stalled disk": func(l *standaloneBroker) {
			l.data = testkit.SmallDisk(l.t, 4<<20)
			ballast := filepath.Join(l.data, "ballast")
			testkit.Must(l.t, os.WriteFile(ballast, make([]byte, 2<<20), 0o600))
			l.start("--mem-queue-size=1000", "--max-bytes-per-file=100000")
			l.order("/topic/create", "")
			l.order("/channel/create", "&channel=c")
			l.limit()
			for end := time.Now().Add(local.Patience); l.publish(10, strings.Repeat("x", 1000)); {
				if time.Now().After(end) {
					l.t.Fatal("the disk does not become full")
				}
			}
			wait(heldFor)
			testkit.Must(l.t, os.Remove(ballast))
			l.left(func() { l.order("/channel/empty", "&channel=c") })
		},
		"stopped process": func(l *standaloneBroker) {
			l.start()
			l.order("/topic/create", "")
			l.order("/channel/create", "&channel=c")
			l.limit()
			nc := testkit.Result(net.Dial("tcp", l.process.TCP)).Must(l.t)
			defer nc.Close()
			testkit.Result(nc.Write(wire.AppendMagic(nil))).Must(l.t)
			l.mpub(nc, 1)() // from here on arrival times are exact, if possible
			l.stop()
			answered := l.mpub(nc, backlog)
			wait(heldFor)
			testkit.Must(l.t, l.process.Signal(syscall.SIGCONT))
			answered()
			l.left(func() {})
		},
		"slow start":           func(l *standaloneBroker) { l.restarted() },
		"slow start from disk": func(l *standaloneBroker) { l.restarted("--durability=fsync") },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			run(&standaloneBroker{t: t, data: t.TempDir(), home: t.TempDir(), topics: []*standalone{
				{name: "d", policy: "delay"}, {name: "r", policy: "reject"},
			}})
		})
	}
}
