package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"github.com/srtm-io/srtm/client/fake"
	"github.com/srtm-io/srtm/internal/program"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/tools/iotpub/report"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func command(t *testing.T, args ...string) (stdout string, err error) {
	t.Helper()
	var out, errs bytes.Buffer
	err = execute(t.Context(), args, &out, &errs)
	if errs.Len() > 0 {
		t.Logf("standard error: %s", errs.String())
	}
	return out.String(), err
}

func TestHelpAndVersion(t *testing.T) {
	for file, args := range map[string][]string{"run.help": {"run", "--help"}, "greedy.help": {"greedy", "--help"}, "schedule.help": {"schedule", "--help"}} {
		out := testkit.Result(command(t, args...)).Must(t)
		testkit.Golden(t, "testdata/"+file, []byte(out))
	}
	if out, err := command(t, "--version"); err != nil || !strings.HasPrefix(out, "iotpub, SRTM ") {
		t.Errorf("%q, %v", out, err)
	}
}

func TestASchedule(t *testing.T) {
	out, err := command(t, "schedule", "--publishers=4", "--rate=3", "--group-size=2", "--sync", "--batch=2", "--duration=3s", "--seed=9")
	testkit.Must(t, err)
	testkit.Golden(t, "testdata/schedule.txt", []byte(out))
}

func TestUsage(t *testing.T) {
	for name, c := range map[string]struct {
		args string
		want string
	}{
		"no such command":   {"fly", `unknown command "fly": there are greedy, help, run, schedule`},
		"no such flag":      {"run --fly", "unknown flag: --fly"},
		"no number":         {"run --publishers many", `invalid argument "many"`},
		"an argument":       {"run here", `run takes no argument, only flags: "here"`},
		"no address":        {"run", "want either the address of a broker or that of a loaddistributor"},
		"no such protocol":  {"run --protocol amqp", `protocol "amqp": want nsq or mqtt`},
		"no MQTT address":   {"run --protocol mqtt", "--protocol mqtt needs --mqtt-address"},
		"a fault of a load": {"run --nsqd-tcp-address 127.0.0.1:1 --rate 0 --batch 0", "rate: 0 msg/s, want above 0 and up to 1000000\nbatch: 0 messages, want 1 .. 10000"},
		"no such form":      {"run --nsqd-tcp-address 127.0.0.1:1 --output xml", `output "xml": want text or json`},
		"no such level":     {"run --nsqd-tcp-address 127.0.0.1:1 --log-level loud", `log level "loud"`},
		"no time":           {"schedule --duration 0s", "duration: 0s, want more than 0"},
	} {
		out, err := command(t, strings.Fields(c.args)...)
		_, usage := errors.AsType[program.UsageError](err)
		if err == nil || !strings.Contains(err.Error(), c.want) || out != "" {
			t.Errorf("%s: %v (printed %q), want %q", name, err, out, c.want)
		}
		if !usage {
			t.Errorf("%s: %v is no usage error", name, err)
		}
	}
}

func TestAFaultOfARecordingIsAFailure(t *testing.T) {
	path := testkit.File(t, "r.csv", "offset_seconds,publisher_id,correlation_key,payload_bytes\n0,a,k,x\n")
	_, err := command(t, "run", "--nsqd-tcp-address=127.0.0.1:1", "--trace="+path)
	if _, usage := errors.AsType[program.UsageError](err); err == nil || usage || !strings.HasPrefix(err.Error(), path+`:2: payload_bytes "x"`) {
		t.Errorf("%v", err)
	}
}

func broker(t *testing.T) *fake.Broker {
	t.Helper()
	b := testkit.Result(fake.NewBroker("a", &fake.Log{})).Must(t)
	t.Cleanup(b.Close)
	return b
}

func TestRunPrintsObjects(t *testing.T) {
	b := broker(t)
	out, err := command(t, "run", "--nsqd-tcp-address="+b.Address(), "--subscribe", "--publishers=5", "--rate=50",
		"--duration=300ms", "--progress=100ms", "--output=json")
	testkit.Must(t, err)
	lines := strings.Split(strings.TrimSpace(out), "\n")
	for _, line := range lines[:len(lines)-1] {
		var p report.Progress
		if err := json.Unmarshal([]byte(line), &p); err != nil || p.Type != report.TypeProgress {
			t.Errorf("%s: %v", line, err)
		}
	}
	var r report.Report
	if err := json.Unmarshal([]byte(lines[len(lines)-1]), &r); err != nil || r.Type != report.TypeReport {
		t.Fatalf("%s: %v", lines[len(lines)-1], err)
	}
	if len(lines) < 2 || r.Accepted == 0 || r.Account == nil || r.Account.Lost+r.Account.Duplicated > 0 || r.Account.Delivered != r.Accepted {
		t.Errorf("%d lines, report %+v", len(lines), r)
	}
}

func TestRunFailsWhenMessagesComeTwice(t *testing.T) {
	b := broker(t)
	b.DeliverEach(2)
	out, err := command(t, "run", "--nsqd-tcp-address="+b.Address(), "--subscribe", "--publishers=2", "--rate=50", "--duration=100ms", "--progress=0")
	if err == nil || !strings.Contains(err.Error(), "delivered more than once") || !strings.Contains(out, "FAILED") {
		t.Errorf("%v\n%s", err, out)
	}
}

func TestRunStopsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	b := broker(t)
	var out bytes.Buffer
	err := execute(ctx, []string{"run", "--nsqd-tcp-address=" + b.Address()}, &out, &out)
	testkit.ErrorIs(t, err, context.Canceled)
}
