package crash

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
)

// recorded matches the part of /stats about topics and channels on record.
var recorded = regexp.MustCompile(`"(topic_name|channel_name|paused|limited)": ?[^,}\]]*`)

// An order that succeeds on a full disk survives a crash, and a refused order changes nothing.
func TestOrdersOnAFullDiskStandOrAreRefused(t *testing.T) {
	for _, order := range []string{
		"/topic/create?topic=u", "/topic/delete?topic=t", "/topic/pause?topic=t", "/topic/limit?topic=t&rate=5&burst=5",
		"/channel/create?topic=t&channel=z", "/channel/delete?topic=t&channel=d", "/channel/pause?topic=t&channel=c",
		"/channel/empty?topic=t&channel=c", "/channel/seek?topic=t&channel=c&to=end",
	} {
		t.Run(order, func(t *testing.T) {
			dir := testkit.SmallDisk(t, 1<<20)
			start := func() *local.Process {
				d := testkit.Result(local.NSQD(localtest.Program(t, "nsqd"), t.TempDir(), "--data-path="+dir, "--durability=fsync")).Must(t)
				t.Cleanup(func() { _ = d.Kill() })
				return d
			}
			d := start()
			web := "http://" + d.HTTP
			ask(t, web+"/topic/create?topic=t", "x")
			ask(t, web+"/channel/create?topic=t&channel=c", "x")
			ask(t, web+"/channel/create?topic=t&channel=d", "x")
			p := &filler{t: t}
			p.connect(d.TCP)
			defer p.nc.Close()
			p.until("E_QUEUE_FULL", 5000)
			ballast := testkit.Result(os.Create(filepath.Join(dir, "ballast"))).Must(t)
			for n, err := 0, error(nil); err == nil && n < 1<<20; n++ {
				_, err = ballast.Write(make([]byte, 100))
			}
			testkit.Must(t, ballast.Close())
			state := func(d *local.Process) (found string) {
				_, body := ask(t, "http://"+d.HTTP+"/stats?format=json&include_clients=false", "")
				for _, field := range recorded.FindAllString(body, -1) {
					found += field + " "
				}
				if strings.Contains(order, "empty") || strings.Contains(order, "seek") {
					found += fmt.Sprint(channel(t, d).Depth)
				}
				return found
			}
			was := state(d)
			code, body := ask(t, web+order, "x")
			is := state(d)
			switch {
			case code == http.StatusOK && is != was:
			case code == http.StatusServiceUnavailable && is == was:
			default:
				t.Errorf("%d %s:\n%s\nthen\n%s", code, body, was, is)
			}
			kill(t, d)
			d = start()
			testkit.WaitFor(t, "the same after a crash", func() bool { return state(d) == is })
		})
	}
}
