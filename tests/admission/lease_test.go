package admission

import (
	"bufio"
	"context"
	"encoding/binary"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"

	"github.com/srtm-io/srtm/admission/client"
	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
)

// holderEnv makes the test program a holder that asks this server.
const holderEnv = "SRTM_TEST_ADMISSION_HOLDER"

// hold decides again and again until it is killed. Of what is admitted it writes when that
// was, from and to.
func hold(server string) {
	c, err := client.New(client.Config{Servers: []string{server}})
	if err != nil {
		panic(err)
	}
	for range time.Tick(time.Millisecond) {
		before := clock.Mono()
		if d := c.Decide(context.Background(), "key", 1); d.Admit {
			record := binary.LittleEndian.AppendUint64(nil, uint64(before))
			os.Stdout.Write(binary.LittleEndian.AppendUint64(record, uint64(clock.Mono())))
		}
	}
}

// admissions are those of all holders.
type admissions struct {
	mu   sync.Mutex
	from []mono.Time
	to   []mono.Time
	by   map[*exec.Cmd]int
}

func (a *admissions) start(t *testing.T, server string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), holderEnv+"="+server)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	testkit.Must(t, err)
	var reading sync.WaitGroup
	reading.Go(func() {
		var record [16]byte
		for r := bufio.NewReader(out); ; {
			if _, err := io.ReadFull(r, record[:]); err != nil {
				return
			}
			a.mu.Lock()
			a.from = append(a.from, mono.Time(binary.LittleEndian.Uint64(record[:])))
			a.to = append(a.to, mono.Time(binary.LittleEndian.Uint64(record[8:])))
			a.by[cmd]++
			a.mu.Unlock()
		}
	})
	t.Cleanup(func() { cmd.Process.Kill(); reading.Wait(); cmd.Wait() })
	return cmd
}

// more waits until a holder has admitted so many more.
func (a *admissions) more(t *testing.T, cmd *exec.Cmd, n int) {
	t.Helper()
	count := func() int {
		a.mu.Lock()
		defer a.mu.Unlock()
		return a.by[cmd]
	}
	before := count()
	testkit.WaitFor(t, "admissions", func() bool { return count() >= before+n })
}

// within fails if there is a time in which more were admitted for certain than the rule
// allows in it. It looks at those that begin and end on a grid.
func (a *admissions) within(t *testing.T, rate float64, capacity int) {
	t.Helper()
	a.mu.Lock()
	defer a.mu.Unlock()
	const grid = 50 * time.Millisecond
	first, last := a.from[0], a.to[0]
	for i := range a.from {
		first, last = min(first, a.from[i]), max(last, a.to[i])
	}
	n := int(last.Sub(first)/grid) + 2
	// of[i][j]: how many began between i and i+1, and ended between j-1 and j
	of := make([][]int, n)
	for i := range of {
		of[i] = make([]int, n)
	}
	for i := range a.from {
		of[a.from[i].Sub(first)/grid][(a.to[i].Sub(first)+grid-1)/grid]++
	}
	for begin := n - 1; begin >= 0; begin-- {
		sum := 0
		for end := range n {
			sum += of[begin][end]
			if begin+1 < n {
				of[begin][end] = sum + of[begin+1][end]
			} else {
				of[begin][end] = sum
			}
			if most := float64(capacity) + rate*grid.Seconds()*float64(end-begin); end > begin && float64(of[begin][end]) > most {
				t.Fatalf("%d were admitted from %v on within %v, %.0f allowed", of[begin][end], time.Duration(begin)*grid, time.Duration(end-begin)*grid, most)
			}
		}
	}
}

// Three programs hold parts of a key. One is killed, then the owner, which starts again;
// in all that time together they are admitted what the rule allows, and in the end it is used.
func TestLeasesThroughKills(t *testing.T) {
	const rate, capacity = 500, 60
	at, program, data := localtest.Ports(t, 3), localtest.Program(t, "admission"), t.TempDir()
	serve := func() *local.Process {
		return localtest.Run(t, program, at[0]+"/healthz", "--data-path="+data, "--http-address="+at[0], "--grpc-address="+at[1], "--udp-address="+at[2], "--log-level=error")
	}
	owner := serve()
	rules := srtmv1.NewAdmissionAdminClient(localtest.Dial(t, at[1]))
	_, err := rules.SetRules(t.Context(), &srtmv1.SetRulesRequest{Rules: []*srtmv1.AdmissionRule{
		{Key: "key", RefillMilli: rate * 1000, Capacity: capacity, Mode: srtmv1.AdmissionMode_ADMISSION_MODE_LEASE},
	}}, grpc.WaitForReady(true))
	testkit.Must(t, err)
	all := &admissions{by: map[*exec.Cmd]int{}}
	var holders []*exec.Cmd
	for range 3 {
		holders = append(holders, all.start(t, at[2]))
	}
	for _, h := range holders {
		all.more(t, h, 200)
	}
	testkit.WaitFor(t, "a lease", func() bool {
		text, _, err := localtest.Ask("GET", "http://"+at[0]+"/metrics", "")
		return err == nil && strings.Contains(text, "srtm_admission_leased_keys 1")
	})
	testkit.Must(t, holders[0].Process.Kill())
	all.more(t, holders[1], 500)
	testkit.Must(t, owner.Kill())
	serve()
	again := all.start(t, at[2])
	for _, h := range append(holders[1:], again) {
		all.more(t, h, 200)
	}
	all.within(t, rate, capacity)
}
