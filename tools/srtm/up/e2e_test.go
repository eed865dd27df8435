package up

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/program"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
)

func TestMain(m *testing.M) { localtest.Main(m) }

var daemons = []string{"nsqd", "loaddistributor", "tbadaptor"}

// output is written by the command and read by the test.
type output struct {
	mu   sync.Mutex
	text bytes.Buffer
	cue  string
	seen chan struct{} // closed when cue has been written
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	had := o.cue != "" && strings.Contains(o.text.String(), o.cue)
	o.text.Write(p)
	if o.cue != "" && !had && strings.Contains(o.text.String(), o.cue) {
		close(o.seen)
	}
	return len(p), nil
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.String()
}

func up(ctx context.Context, stdout, stderr *output, args ...string) error {
	cmd := Command()
	cmd.SilenceUsage, cmd.SilenceErrors = true, true
	cmd.SetArgs(args)
	cmd.SetOut(stdout)
	cmd.SetErr(stderr)
	return cmd.ExecuteContext(ctx)
}

// The whole command at small size: real processes, real sockets, go-nsq, a report.
func TestUp(t *testing.T) {
	bin := localtest.Folder(t, append(daemons, "tools/iotpub", "admission", "gateway")...)

	t.Run("ends with a report", func(t *testing.T) {
		stdout, stderr := output{}, output{cue: "gateway: POST", seen: make(chan struct{})}
		dir := t.TempDir()
		answers := make(chan error, 1)
		go func() {
			select {
			case <-stderr.seen:
				answers <- errors.Join(asksAdmission(t.Context(), stderr.String()), asksGateway(t.Context(), stderr.String()))
			case <-t.Context().Done():
			}
		}()
		err := up(t.Context(), &stdout, &stderr, "--bin-dir="+bin, "--data-dir="+filepath.Join(dir, "new"), "--brokers=3",
			"--publishers=60", "--rate=10", "--group-size=10", "--duration=4s", "--calibration=1s", "--max-lateness=10s", "--output=json", "--admission", "--gateway", "--mqtt")
		if err != nil {
			t.Fatalf("%v\n%s", err, stderr.String())
		}
		if !strings.Contains(stderr.String(), stderr.cue) {
			t.Fatalf("no address of the gateway in %s", stderr.String())
		}
		if left := testkit.Private(t, dir); left[".log"] < 3 || left[""] == 0 {
			t.Errorf("files left: %v; want logs, and what brokers keep", left)
		}
		var r Report
		if err := json.Unmarshal([]byte(stdout.String()), &r); err != nil {
			t.Fatalf("%v\n%s", err, stdout.String())
		}
		if len(r.Phases) != 2 || len(r.Calibration) != 1 || r.Reduced || r.Interrupted {
			t.Fatalf("%+v", r)
		}
		if !strings.Contains(stderr.String(), "MQTT: the sensors publish to 127.0.0.1:") {
			t.Errorf("no address for MQTT in %s", stderr.String())
		}
		testkit.NoError(t, <-answers, "the daemons beside the cluster")
		for i, brokers := range []int{1, 3} {
			p := r.Phases[i]
			a := p.Emulator.Account
			testkit.Equal(t, p.Emulator.Protocol, "mqtt", p.Name)
			if len(p.Placement) != brokers || a == nil || a.Accepted < 1000 || a.Delivered != a.Accepted || a.Lost+a.Duplicated > 0 {
				t.Errorf("%s: %+v, %+v", p.Name, p.Placement, a)
			}
			var rate, burst int64
			for _, q := range p.Placement {
				rate += q.RateMilli
				burst += q.Burst
			}
			if rate != r.RateMilli || burst != r.Burst {
				t.Errorf("%s: shares sum to %d, %d; the contract is %d, %d", p.Name, rate, burst, r.RateMilli, r.Burst)
			}
			if p.Broker == nil || p.Broker.Delivered == 0 || p.Broker.Delivery.Count == 0 {
				t.Errorf("%s: the brokers' stats are %+v", p.Name, p.Broker)
			}
		}
		if r.Phases[0].Emulator.Offered != r.Phases[1].Emulator.Offered {
			t.Errorf("the phases offered %d and %d", r.Phases[0].Emulator.Offered, r.Phases[1].Emulator.Offered)
		}
	})

	t.Run("reports what there is when it is interrupted", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		stdout := output{cue: "phase 1 of 2", seen: make(chan struct{})}
		var stderr output
		go func() {
			select {
			case <-stdout.seen:
			case <-t.Context().Done():
			}
			cancel()
		}()
		err := up(ctx, &stdout, &stderr, "--bin-dir="+bin, "--data-dir="+t.TempDir(), "--brokers=2",
			"--publishers=30", "--duration=10m", "--calibration=0s", "--burst=20")
		text := stdout.String()
		if err != nil || !strings.Contains(text, "INTERRUPTED") || !strings.Contains(text, "was delivered exactly once") || strings.Contains(text, "BLIND") {
			t.Errorf("%v\n%s\n%s", err, text, stderr.String())
		}
	})

	t.Run("replays a recording", func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "r.csv")
		var rows strings.Builder
		rows.WriteString("offset_seconds,publisher_id,correlation_key,payload_bytes\n")
		for i := range 400 {
			fmt.Fprintf(&rows, "%d.%d,loop%d,junction%d,80\n", i/100, i/10%10, i%9, i%3)
		}
		testkit.Must(t, os.WriteFile(path, []byte(rows.String()), 0o644))
		var stdout, stderr output
		err := up(t.Context(), &stdout, &stderr, "--bin-dir="+bin, "--data-dir="+t.TempDir(), "--brokers=2", "--trace="+path,
			"--compress=2", "--copies=2", "--duration=4s", "--calibration=0s", "--max-lateness=10s")
		if text := stdout.String(); err != nil || !strings.Contains(text, "18 publishers") || !strings.Contains(text, "Each of 1600 accepted messages was delivered exactly once.") {
			t.Errorf("%v\n%s\n%s", err, text, stderr.String())
		}
	})
}

// asksAdmission requests a decision from the admission service that `srtm up` names in text.
func asksAdmission(ctx context.Context, text string) error {
	found := regexp.MustCompile(`--admission-address=(\S+)`).FindStringSubmatch(text)
	if found == nil {
		return fmt.Errorf("no address of admission in %q", text)
	}
	conn, err := grpc.NewClient(found[1], grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	reply, err := srtmv1.NewAdmissionAdminClient(conn).Ask(ctx, &srtmv1.AskRequest{Key: "tenant/demo/http", Cost: 1}, grpc.WaitForReady(true))
	if err == nil && reply.Unanswered {
		err = errors.New("admission has no answer")
	}
	return errors.Join(err, conn.Close())
}

// asksGateway publishes without a publisher's id to the gateway that `srtm up` names in text. The refusal shows that the
// gateway passes messages to brokers.
func asksGateway(ctx context.Context, text string) error {
	url := regexp.MustCompile(`http://\S+/pub\?topic=\w+`).FindString(text)
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, strings.NewReader("m"))
	if err != nil {
		return err
	}
	res, err := (&http.Transport{DisableKeepAlives: true}).RoundTrip(req)
	if err != nil {
		return err
	}
	body, err := io.ReadAll(res.Body)
	if !strings.Contains(string(body), "MISSING_PUBLISHER_ID") {
		err = errors.Join(err, fmt.Errorf("%s: %d %s", url, res.StatusCode, body))
	}
	return errors.Join(err, res.Body.Close())
}

// reporter is an iotpub that carries no more than 3,000 msg/s.
const reporter = `#!/bin/sh
for a in "$@"; do case "$a" in
--publishers=*) n=${a#*=};;
esac; done
offered=$((n * 10)); achieved=$offered
if [ $achieved -gt 3000 ]; then achieved=3000; fi
echo '{"type":"report","publishers":'$n',"offered":'$offered',"accepted":'$achieved',"offered_per_s":'$offered',"achieved_per_s":'$achieved',"lateness":{},"answer":{},"end_to_end":{},"account":{"accepted":'$achieved',"delivered":'$achieved',"lost":LOST,"duplicated":0}}'
`

func withReporter(t *testing.T, bin, text string) string {
	t.Helper()
	testkit.Must(t, os.WriteFile(filepath.Join(bin, "iotpub"), []byte(text), 0o755))
	return bin
}

func TestUpOnAMachineThatIsTooSmall(t *testing.T) {
	bin := localtest.Folder(t, daemons...)

	t.Run("takes fewer publishers and says so", func(t *testing.T) {
		withReporter(t, bin, strings.ReplaceAll(reporter, "LOST", "0"))
		var stdout, stderr output
		err := up(t.Context(), &stdout, &stderr, "--bin-dir="+bin, "--data-dir="+t.TempDir(), "--brokers=2", "--duration=2s", "--publishers=1000", "--rate=10")
		text := stdout.String()
		for _, want := range []string{
			"1000 publishers, offered 10000/s, achieved 3000/s (30.0 %)", "only 30.0 % of the offered rate was achieved",
			"this machine does not carry that; trying 240 publishers", "THE LOAD IS SMALLER THAN REQUESTED", "240 poisson publishers",
		} {
			if !strings.Contains(text, want) {
				t.Errorf("%q is not said", want)
			}
		}
		if err != nil || t.Failed() {
			t.Errorf("%v\n%s", err, text)
		}
	})

	t.Run("without a calibration says that the load was not carried", func(t *testing.T) {
		withReporter(t, bin, strings.ReplaceAll(reporter, "LOST", "0"))
		var stdout, stderr output
		err := up(t.Context(), &stdout, &stderr, "--bin-dir="+bin, "--data-dir="+t.TempDir(), "--brokers=2", "--duration=2s", "--calibration=0s", "--publishers=1000")
		if err != nil || !strings.Contains(stdout.String(), "NOTE: SRTM placement: this machine did not carry the load: 3000.0 msg/s of 10000.0 offered") {
			t.Errorf("%v\n%s", err, stdout.String())
		}
	})

	t.Run("fails when a message was lost", func(t *testing.T) {
		withReporter(t, bin, strings.ReplaceAll(reporter, "LOST", "1"))
		var stdout, stderr output
		err := up(t.Context(), &stdout, &stderr, "--bin-dir="+bin, "--data-dir="+t.TempDir(), "--brokers=2", "--duration=2s", "--calibration=0s", "--publishers=100")
		if err == nil || !strings.Contains(err.Error(), "SRTM placement: lost 1 accepted message") || !strings.Contains(stdout.String(), "NOT EXACTLY ONCE") {
			t.Errorf("%v\n%s", err, stdout.String())
		}
	})

	t.Run("reports what there was before it failed", func(t *testing.T) {
		withReporter(t, bin, strings.ReplaceAll(strings.Replace(reporter, "--publishers", "--topic=sensors-blind) exit 1;;\n--publishers", 1), "LOST", "0"))
		var stdout, stderr output
		err := up(t.Context(), &stdout, &stderr, "--bin-dir="+bin, "--data-dir="+t.TempDir(), "--brokers=2", "--duration=2s", "--calibration=0s")
		text := stdout.String()
		if err == nil || !strings.Contains(err.Error(), "blind split: iotpub: exit status 1") ||
			!strings.Contains(text, "IT FAILED; what follows is what there was") || !strings.Contains(text, "was delivered exactly once") {
			t.Errorf("%v\n%s", err, text)
		}
	})

	t.Run("says what went wrong with the emulator", func(t *testing.T) {
		withReporter(t, bin, "#!/bin/sh\necho 'iotpub: no route' >&2; exit 1\n")
		var stdout, stderr output
		err := up(t.Context(), &stdout, &stderr, "--bin-dir="+bin, "--data-dir="+t.TempDir(), "--brokers=1", "--duration=2s")
		testkit.ErrorHas(t, err, "calibration: iotpub: exit status 1: iotpub: no route")
	})

	t.Run("says that the load fits no brokers", func(t *testing.T) {
		var stdout, stderr output
		err := up(t.Context(), &stdout, &stderr, "--bin-dir="+bin, "--data-dir="+t.TempDir(), "--brokers=2", "--mcap=100")
		testkit.ErrorHas(t, err, "create topic calibration")
	})
}

func TestBadCommandLines(t *testing.T) {
	for args, want := range map[string]string{
		"--brokers 0 --slo -1s": "--brokers 0: want 1 to 100\n--slo: -1s is below",
		"--rate -1":             "rate: -1 msg/s",
		"--sync --group-size 1": "sync: needs groups of at least 2 publishers",
	} {
		var stdout, stderr output
		err := up(t.Context(), &stdout, &stderr, strings.Fields(args)...)
		if _, usage := errors.AsType[program.UsageError](err); err == nil || !usage || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", args, err, want)
		}
	}
	var stdout, stderr output
	path := testkit.File(t, "r.csv", "what\n")
	err := up(t.Context(), &stdout, &stderr, "--trace="+path)
	if _, usage := errors.AsType[program.UsageError](err); err == nil || usage || !strings.HasPrefix(err.Error(), path+":1: header") {
		t.Errorf("%v", err)
	}
	empty := t.TempDir()
	testkit.ErrorHas(t, up(t.Context(), &stdout, &stderr, "--bin-dir="+empty, "--data-dir="+t.TempDir()), "--bin-dir")
}

// After a failure the command leaves only the logs that its output names.
func TestLogsAreKeptAfterAFailureOnly(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	var stdout, stderr output
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Hang)
	defer cancel()
	if err := up(ctx, &stdout, &stderr, "--bin-dir="+t.TempDir()); err == nil {
		t.Fatal("it ran without programs")
	}
	left, err := filepath.Glob(filepath.Join(os.TempDir(), "srtm-up-*"))
	if err != nil || len(left) != 1 || !strings.Contains(stderr.String(), left[0]) {
		t.Errorf("left %v, %v; it says %q", left, err, stderr.String())
	}
}

// Without a nats-server, the command explains how to get one before starting anything.
func TestReplicatedNeedsNATS(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	var stdout, stderr output
	err := up(t.Context(), &stdout, &stderr, "--replicated", "--bin-dir="+t.TempDir())
	if err == nil || !strings.Contains(err.Error(), "nats-server") || !strings.Contains(err.Error(), "make build") {
		t.Errorf("without one: %v", err)
	}
	for _, args := range [][]string{{"--replicated", "--nats-server=/nowhere"}, {"--nats-server=/nowhere"}} {
		if err := up(t.Context(), &stdout, &stderr, args...); !errors.As(err, new(program.UsageError)) {
			t.Errorf("%v: %v", args, err)
		}
	}
}
