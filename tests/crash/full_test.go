package crash

import (
	"bufio"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
	"github.com/srtm-io/srtm/nsq/wire"
)

// ask returns the status and body of a GET, or of a POST if post is not empty.
func ask(t *testing.T, url, post string) (int, string) {
	t.Helper()
	method := http.MethodGet
	if post != "" {
		method = http.MethodPost
	}
	text, code, err := localtest.Ask(method, url, post)
	testkit.Must(t, err)
	return code, text
}

// On a full disk a publisher gets an error that is not fatal, and no accepted message is lost. When
// the disk has room again, the broker works as before.
func TestFullDiskLosesNoAcceptedMessage(t *testing.T) {
	for _, flag := range []string{"--durability=memory", "--durability=fsync", "--mem-queue-size=0"} {
		t.Run(flag, func(t *testing.T) {
			dir := testkit.SmallDisk(t, 2<<20)
			ballast := filepath.Join(dir, "ballast")
			testkit.Must(t, os.WriteFile(ballast, make([]byte, 1<<20), 0o600))
			d, err := local.NSQD(localtest.Program(t, "nsqd"), t.TempDir(), "--data-path="+dir, "--mem-queue-size=10", "--max-bytes-per-file=100000", flag)
			testkit.Must(t, err)
			defer func() {
				testkit.NoError(t, d.Stop())
			}()
			web := "http://" + d.HTTP
			ask(t, web+"/topic/create?topic=t", "x")
			ask(t, web+"/channel/create?topic=t&channel=c", "x")

			p := &filler{t: t}
			p.connect(d.TCP)
			defer p.nc.Close()
			p.until("E_QUEUE_FULL", 5000)
			// Messages that moved from the topic to the channel make room for a few more.
			testkit.WaitFor(t, "full for HTTP", func() bool { return p.web(web) == http.StatusServiceUnavailable })
			testkit.WaitFor(t, "ill", func() bool {
				p.until("E_QUEUE_FULL", 5000) // on the same connection
				code, body := ask(t, web+"/ping", "")
				return code == http.StatusInternalServerError && strings.HasPrefix(body, "NOK - ") && strings.Contains(body, "space")
			})
			if code, body := ask(t, web+"/healthz", ""); code != http.StatusServiceUnavailable {
				t.Errorf("healthz: %d %s", code, body)
			}
			if _, body := ask(t, web+"/stats?format=json", ""); !strings.Contains(body, `"health":"NOK - `) {
				t.Errorf("stats: %s", body)
			}
			if _, body := ask(t, web+"/metrics", ""); !strings.Contains(body, "srtm_nsqd_disk_healthy 0") {
				t.Error("metrics: the disk seems well")
			}

			// Topics and channels can still be created, and are recorded later.
			if code, body := ask(t, web+"/topic/create?topic=later", "x"); code != http.StatusOK {
				t.Errorf("create a topic: %d %s", code, body)
			}

			testkit.Must(t, os.Remove(ballast))
			testkit.WaitFor(t, "well again, with no publisher", func() bool {
				code, _ := ask(t, web+"/ping", "")
				return code == http.StatusOK
			})
			if _, body := ask(t, web+"/metrics", ""); !strings.Contains(body, "srtm_nsqd_disk_healthy 1") {
				t.Error("metrics: the disk seems ill")
			}
			testkit.WaitFor(t, "accepting again", func() bool { return p.publish() == "OK" })
			for range 20 {
				testkit.MustEqual(t, p.publish(), "OK", "with room again")
			}
			// Full once more; this time, deliveries make room.
			p.until("E_QUEUE_FULL", 5000)
			got := p.collect(d.TCP, len(p.accepted))
			if !slices.Equal(got, p.accepted) {
				t.Errorf("%d accepted, %d delivered: %d lost, %d more", len(p.accepted), len(got), missing(p.accepted, got), missing(got, p.accepted))
			}
			testkit.WaitFor(t, "well after all was taken", func() bool {
				code, _ := ask(t, web+"/ping", "")
				return code == http.StatusOK && p.publish() == "OK"
			})
			t.Logf("%d messages accepted, on a disk of 2 MB", len(p.accepted))
		})
	}
}

// missing counts the strings of a that are not in b.
func missing(a, b []string) (n int) {
	there := map[string]bool{}
	for _, s := range b {
		there[s] = true
	}
	for _, s := range a {
		if !there[s] {
			n++
		}
	}
	return n
}

// filler publishes one message at a time.
type filler struct {
	t        *testing.T
	nc       net.Conn
	r        *bufio.Reader
	sent     int
	accepted []string // names, at the front of the bodies
}

func (p *filler) connect(address string) {
	p.t.Helper()
	nc := testkit.Result(dial(address)).Must(p.t)
	p.nc, p.r = nc, bufio.NewReader(nc)
}

// publish returns the answer.
func (p *filler) publish() string {
	p.t.Helper()
	name := fmt.Sprintf("%08d", p.sent)
	p.sent++
	b := append([]byte(name), make([]byte, 1000)...)
	testkit.Result(p.nc.Write(wire.AppendPub(nil, "t", b))).Must(p.t)
	answer, err := frame(p.r)
	if err != nil {
		p.t.Fatalf("publish %s: %v", name, err)
	}
	if answer == "OK" {
		p.accepted = append(p.accepted, name)
	}
	return answer
}

// web is publish over HTTP, and returns the status.
func (p *filler) web(url string) int {
	p.t.Helper()
	name := fmt.Sprintf("%08d", p.sent)
	p.sent++
	code, _ := ask(p.t, url+"/pub?topic=t", name+strings.Repeat("x", 1000))
	if code == http.StatusOK {
		p.accepted = append(p.accepted, name)
	}
	return code
}

// until publishes until the answer begins with want.
func (p *filler) until(want string, most int) {
	p.t.Helper()
	for range most {
		got := p.publish()
		if strings.HasPrefix(got, want) {
			return
		}
		if got != "OK" {
			p.t.Fatalf("got %q, want OK or %s", got, want)
		}
	}
	p.t.Fatalf("no %s after %d messages", want, most)
}

// collect takes the given number of messages, and returns their names.
func (p *filler) collect(address string, count int) (names []string) {
	p.t.Helper()
	nc := subscribe(p.t, address, 1)
	defer nc.Close()
	done := errors.New("done")
	if err := take(nc, func(m wire.Message) error {
		if names = append(names, string(m.Body[:8])); len(names) < count {
			return nil
		}
		return done
	}); !errors.Is(err, done) {
		p.t.Fatalf("after %d of %d messages: %v", len(names), count, err)
	}
	return names
}
