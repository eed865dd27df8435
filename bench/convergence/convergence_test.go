//go:build linux

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/tools/iotpub/report"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// Who is idle takes the pace for a message; what comes meanwhile waits its turn.
func TestAPaceIsThatOfOneServer(t *testing.T) {
	p := pacer{pace: 100}
	for _, c := range []struct{ at, done mono.Time }{{1000, 1100}, {1000, 1200}, {1150, 1300}, {1300, 1400}, {5000, 5100}} {
		if got := p.take(c.at); got != c.done {
			t.Errorf("a message at %d is done at %d, want %d", c.at, got, c.done)
		}
	}
}

// fake is a broker as a consumer sees it.
type fake struct {
	t    *testing.T
	conn net.Conn
	in   []byte
}

func accept(t *testing.T, ln net.Listener) *fake {
	t.Helper()
	conn, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() }) // closed already, in some tests
	f := &fake{t: t, conn: conn}
	magic := make([]byte, len(wire.Magic))
	if _, err := io.ReadFull(conn, magic); err != nil || string(magic) != wire.Magic {
		t.Fatalf("%q, %v", magic, err)
	}
	for _, verb := range []wire.Verb{wire.VerbIdentify, wire.VerbSub} {
		if c := f.command(); c.Verb != verb {
			t.Fatalf("%v, want %v", c.Verb, verb)
		}
		f.write(wire.AppendResponse(nil, wire.OK))
	}
	if c := f.command(); c.Verb != wire.VerbRdy || c.Ready != credit {
		t.Fatalf("%v %d", c.Verb, c.Ready)
	}
	return f
}

func (f *fake) write(b []byte) {
	f.t.Helper()
	if _, err := f.conn.Write(b); err != nil {
		f.t.Fatal(err)
	}
}

// command returns the next one; its views into the buffer are good until then.
func (f *fake) command() wire.Command {
	f.t.Helper()
	for {
		c, n, _, err := wire.ParseCommand(f.in, wire.DefaultLimits())
		if err != nil {
			f.t.Fatal(err)
		}
		if n > 0 {
			f.in = f.in[n:]
			return c
		}
		more := make([]byte, 4096)
		read, err := f.conn.Read(more)
		if err != nil {
			f.t.Fatal(err)
		}
		f.in = append(bytes.Clone(f.in), more[:read]...)
	}
}

func id(n int) (id wire.MessageID) {
	copy(id[:], fmt.Sprintf("%016x", n))
	return id
}

// running starts consumers, and returns what ends them.
func running(t *testing.T, pace time.Duration) (c *consumers, end func() error) {
	t.Helper()
	c, err := newConsumers("t", "c", pace)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	over := make(chan error, 1)
	go func() { over <- c.Run(ctx) }()
	return c, func() error {
		cancel()
		err := <-over
		if closed := c.close(); closed != nil {
			t.Error(closed)
		}
		return err
	}
}

func connect(t *testing.T, c *consumers) (*fake, string) {
	t.Helper()
	ln := testkit.Listen(t)
	connected := make(chan error, 1)
	go func() { connected <- c.Connect(t.Context(), ln.Addr().String()) }()
	f := accept(t, ln)
	if err := <-connected; err != nil {
		t.Fatal(err)
	}
	return f, ln.Addr().String()
}

// A broker with credit as NSQ's sees messages finished one at a time, in order,
// never earlier than the pace allows, whatever another broker has.
func TestMessagesAreFinishedAtThePace(t *testing.T) {
	const pace, n = 300 * time.Microsecond, 50
	c, end := running(t, pace)
	busy, _ := connect(t, c)
	idle, _ := connect(t, c)
	begin := clock.Mono()
	next := 0
	for ; next < credit; next++ {
		busy.write(wire.AppendMessage(nil, 0, 1, id(next), []byte("x")))
	}
	idle.write(wire.AppendResponse(wire.AppendMessage(nil, 0, 1, id(1000), make([]byte, 10_000)), wire.Heartbeat))
	if c := idle.command(); c.Verb != wire.VerbNop {
		t.Errorf("%v in answer to a heartbeat", c.Verb)
	}
	if c := idle.command(); c.Verb != wire.VerbFin || c.ID != id(1000) {
		t.Errorf("%v %v", c.Verb, c.ID)
	}
	for i := range n {
		if c := busy.command(); c.Verb != wire.VerbFin || c.ID != id(i) {
			t.Fatalf("%v %v, want the end of %d", c.Verb, c.ID, i)
		}
		if took, least := clock.Mono().Sub(begin), time.Duration(i+1)*pace; took < least {
			t.Fatalf("%d messages in %v, want %v or more", i+1, took, least)
		}
		if next < n {
			busy.write(wire.AppendMessage(nil, 0, 1, id(next), []byte("x")))
			next++
		}
	}
	if err := end(); err != nil {
		t.Error(err)
	}
	if got := c.late.Count(); got != n+1 {
		t.Errorf("%d messages were timed, want %d", got, n+1)
	}
}

// The topic leaves a broker, and comes back.
func TestAConsumerEndsWithItsConnection(t *testing.T) {
	c, end := running(t, time.Millisecond)
	f, address := connect(t, c)
	if !c.Connected(address) {
		t.Error("not connected")
	}
	f.write(wire.AppendMessage(nil, 0, 1, id(1), nil))
	if err := f.conn.Close(); err != nil {
		t.Fatal(err)
	}
	deadline := time.After(10 * time.Second)
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for c.Connected(address) {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatal("still connected")
		}
	}
	again, _ := connect(t, c)
	again.write(wire.AppendMessage(nil, 0, 1, id(2), nil))
	if c := again.command(); c.Verb != wire.VerbFin || c.ID != id(2) {
		t.Errorf("%v %v", c.Verb, c.ID)
	}
	if err := end(); err != nil {
		t.Error(err)
	}
}

func TestABrokerThatRefusesIsAnError(t *testing.T) {
	c, end := running(t, time.Millisecond)
	f, address := connect(t, c)
	f.write(wire.AppendError(nil, wire.NewError(wire.CodeInvalid, "no")))
	if _, err := io.Copy(io.Discard, f.conn); err != nil { // until it has hung up
		t.Log(err)
	}
	if err := end(); err == nil || !strings.Contains(err.Error(), "consumer of "+address) || !strings.Contains(err.Error(), "E_INVALID") {
		t.Errorf("%v", err)
	}
}

// By rate alone the topic of every row fits on one broker, and its burst is enough
// for its own schedule.
func TestTheContract(t *testing.T) {
	c, err := parse(nil, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	for _, group := range c.rows {
		sold, err := contract(c.spec(group), c.slo, c.margin)
		if err != nil {
			t.Fatal(err)
		}
		// A group is let through at once.
		if sold.RateMilli != 1_320_000 || sold.Burst < int64(group*10) {
			t.Errorf("groups of %d: r %d, b %d", group, sold.RateMilli, sold.Burst)
		}
	}
}

func TestTheTable(t *testing.T) {
	r := Report{Version: "SRTM x", CPUs: 2, Args: []string{"--seed=7"}, Rows: []Row{
		{Group: 5, Mode: modeOff, K: 1, Check: Check{Late: 0.001, Met: true, Delivery: report.Quantiles{P99Us: 5000}, Processing: report.Quantiles{P99Us: 5000}}},
		{
			Group: 30, Mode: "fast", K: 4, Fit: &Fit{Seconds: 61.25, Rounds: []Rounds{{1, 1}, {4, 1}}},
			Check:    Check{Late: 0.0234, Delivery: report.Quantiles{P99Us: 15_000}, Access: report.Quantiles{P99Us: 100}},
			Consumer: report.Quantiles{P99Us: 90}, Publishers: Publishers{Late: report.Quantiles{P99Us: 1500}},
		},
	}}
	var b bytes.Buffer
	if err := r.WriteText(&b); err != nil {
		t.Fatal(err)
	}
	testkit.Golden(t, "testdata/table.txt", b.Bytes())
}

func TestBadFlags(t *testing.T) {
	for args, want := range map[string]string{
		"rest":                          `unexpected argument "rest"`,
		"--rows=1":                      `--rows "1": want numbers of 2 to all 300 publishers`,
		"--rows=5,x":                    `--rows "x"`,
		"--rows=40 --publishers=30":     `--rows "40": want numbers of 2 to all 30 publishers`,
		"--modes=slow":                  `--modes "slow" is none of off, fast, paper`,
		"--brokers=0":                   "--brokers 0: want 1 to 20",
		"--pace=1us":                    "--pace 1µs: want 20us to 1s",
		"--slo=0s":                      "--slo 0s is not above 0",
		"--margin=-1":                   "--margin -1: want 0 to 100",
		"--mcap=-1":                     "--mcap -1: want 1 or more",
		"--margin=NaN":                  "--margin NaN",
		"--round=0s":                    "--round 0s: want 1s or more",
		"--check=0s":                    "--check 0s: want 1s to 10m",
		"--limit=2h":                    "--limit 2h0m0s: want 1s to 1h",
		"--rate=0 --batch=0":            "rate: 0 msg/s",
		"--process=slow":                `process: "slow"`,
		"--nonsense":                    "flag provided but not defined",
		"--bin-dir=" + t.TempDir():      "run make build",
		"--brokers=0 --modes=a --slo=0": "--brokers 0",
	} {
		var out bytes.Buffer
		err := run(t.Context(), strings.Fields(args), &out, &out)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", args, err, want)
		}
	}
}

// One row with real processes. Its SLO is wide, so that what else runs on the
// machine decides nothing.
func TestARow(t *testing.T) {
	bin := t.TempDir()
	build := exec.CommandContext(t.Context(), "go", "build", "-o", bin+string(filepath.Separator), "./nsqd", "./loaddistributor", "./tbadaptor", "./tools/iotpub")
	build.Dir = testkit.Root(t)
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("go build: %v\n%s", err, out)
	}
	file := filepath.Join(t.TempDir(), "rows.json")
	var out, errs bytes.Buffer
	err := run(t.Context(), []string{
		"--bin-dir=" + bin, "--json=" + file, "--rows=5", "--modes=fast", "--brokers=2", "--publishers=30", "--rate=40", "--batch=2",
		"--slo=5s", "--check=1s", "--limit=2m",
	}, &out, &errs)
	if err != nil {
		t.Fatalf("%v\n%s", err, errs.String())
	}
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var r Report
	if err := json.Unmarshal(text, &r); err != nil {
		t.Fatal(err)
	}
	if len(r.Rows) != 1 {
		t.Fatalf("%+v", r)
	}
	row := r.Rows[0]
	if row.Fit == nil || !row.Fit.Fitted || !reflect.DeepEqual(row.Fit.Rounds, []Rounds{{1, 1}}) || row.K != 1 || row.State != srtmv1.TopicState_TOPIC_STATE_ACTIVE.String() {
		t.Errorf("%+v, %+v", row, row.Fit)
	}
	if c := row.Check; !c.Met || c.Late != 0 || c.Messages == 0 || c.Delivery.Count != int64(c.Messages) {
		t.Errorf("%+v", c)
	}
	if p := row.Publishers; p.Accepted == 0 || p.Accepted != p.Sent || row.Consumer.Count < int64(row.Check.Messages) {
		t.Errorf("%+v, %+v", p, row.Consumer)
	}
	if !strings.Contains(out.String(), "met") {
		t.Error(out.String())
	}
}
