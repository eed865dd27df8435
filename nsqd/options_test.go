package main

import (
	"bytes"
	"flag"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"github.com/srtm-io/srtm/internal/testkit"
)

// daemonEnv makes this test binary run as nsqd.
const daemonEnv = "SRTM_TEST_IS_NSQD"

func TestMain(m *testing.M) {
	if os.Getenv(daemonEnv) != "" {
		main()
	}
	testkit.Main(m)
}

// parse returns the options of the flags.
func parse(args ...string) (*options, error) {
	o := new(options)
	_, _, err := o.program().Parse(args, io.Discard)
	return o, err
}

func TestDefaultsAreValid(t *testing.T) {
	o := testkit.Result(parse()).Must(t)
	if o.managed() {
		t.Error("a broker without a loaddistributor is not managed")
	}
	if !o.broker.AutoCreate {
		t.Error("a standalone broker creates topics as NSQ does")
	}
	o = testkit.Result(parse("-loaddistributor-address=127.0.0.1:4170")).Must(t)
	if o.broker.AutoCreate {
		t.Error("a managed broker must not create topics: their publishers would escape the contract")
	}
}

func TestHelpAndVersionRunNothing(t *testing.T) {
	for _, arg := range []string{"--help", "-h", "--version"} {
		var out bytes.Buffer
		if _, _, err := new(options).program().Parse([]string{arg}, &out); err == nil || out.Len() == 0 {
			t.Errorf("%s: %v, printed %d bytes", arg, err, out.Len())
		}
	}
}

func TestBadFlagsAreNamedAllAtOnce(t *testing.T) {
	for _, c := range []struct {
		args string
		want []string
	}{
		{"--no-such-flag", []string{"no-such-flag"}},
		{"stray", []string{`"stray"`}},
		{"--mem-queue-size=-1 --output-buffering=loud --arrival-stamps=guess", []string{"--mem-queue-size -1", `"loud"`, `"guess"`}},
		{"--arrival-stamps=off --arrival-stamps-dir=/x", []string{"--arrival-stamps-dir is of no use with --arrival-stamps=off"}},
		{"--arrival-stamps-connections=-1 --pin-arrival-stamps=me", []string{"connections -1", "--pin-arrival-stamps needs"}},
		{"--arrival-stamps-connections=2000000", []string{"2000000", "1048576"}},
		{"--http-token-file=/does/not/exist", []string{"--http-token-file: open /does/not/exist"}},
		{"--max-msg-size=-1 --max-rdy-count=0", []string{"-1", "0"}},
		{"--msg-timeout=1h --max-msg-timeout=1m", []string{"--msg-timeout 1h"}},
		{"--write-timeout=0s --drain-timeout=-1s --max-connections=-1", []string{"--write-timeout 0s", "drain-timeout", "connections"}},
		{"--max-backdating=-1s", []string{"--max-backdating -1s", "1s"}},
		{"--max-backdating=1001ms", []string{"--max-backdating 1.001s is outside [0, 1s]"}},
		{"--drain-timeout=30s", []string{"--drain-timeout 30s", "27s"}},
		{"--broadcast-tcp-port=70000", []string{"70000"}},
		{"--broadcast-mqtt-port=-1 --broadcast-mqtts-port=70001", []string{"-1", "70001"}},
		{"--loaddistributor-address=x:1 --mcap=0 --topic-limit=t:1:1", []string{"--mcap 0", "--topic-limit"}},
		{"--topic-limit=t", []string{"topic:rate:burst"}},
		{"--topic-limit=bad*name:1:1", []string{`"bad*name"`}},
		{"--topic-limit=t:fast:1", []string{`"fast"`}},
		{"--topic-limit=t:1:much", []string{`"much"`}},
		{"--topic-limit=t:-5:1", []string{"topic-limit"}},
		{"--topic-limit=t:0:0", []string{"stop the topic"}},
		{"--topic-limit=t:1:1:shout", []string{`"shout"`}},
		{"--tls-cert=a", []string{"--tls-cert", "--tls-key"}},
		{"--tls-key=a", []string{"--tls-cert", "--tls-key"}},
		{"--tls-required", []string{"--tls-required"}},
		{"--tls-required=maybe", []string{`"maybe"`, "tcp-https"}},
		{"--io-loops=many", []string{`"many"`}},
		{"--io-loops=-1", []string{`"-1"`}},
		{"--io-loops=1000000 --max-msg-size=1073741824", []string{"--io-loops 1000000: want 0 to 1024", "--max-msg-size 1073741824 is more than"}},
		{"--tls-min-version=tls2", []string{`"tls2"`}},
		{"--tls-cert=a --tls-key=b --tls-client-auth-policy=ask", []string{`"ask"`, "require-verify"}},
		{"--tls-client-auth-policy=require", []string{"--tls-client-auth-policy needs"}},
		{"--max-deflate-level=0", []string{"--max-deflate-level 0"}},
		{"--max-deflate-level=10 --max-defer-timeout=-1s", []string{"--max-deflate-level 10", "-1s"}},
		{"--tcp-address= --memory-limit=-1", []string{"--tcp-address", "--memory-limit -1"}},
		{"--https-address=/a/path", []string{"--https-address"}},
		{"--loaddistributor-address=x:1 --tcp-address=/a/path --http-address=", []string{"--tcp-address", "--http-address"}},
		{"--max-channel-consumers=-1", []string{"--max-channel-consumers -1"}},
		{"--lookupd-tcp-address=no:wh:ere --lookupd-tcp-address=a:", []string{`"no:wh:ere"`, `"a:"`}},
		{"--http-client-connect-timeout=0s --http-client-request-timeout=-1s", []string{"--http-client-connect-timeout 0s", "--http-client-request-timeout -1s"}},
		{"--log-level=loud", []string{`"loud"`}},
		{"--e2e-processing-latency-percentile=1.5", []string{`"1.5"`}},
		{"--e2e-processing-latency-percentile=0.5,0", []string{`"0"`}},
		{"--e2e-processing-latency-percentile=NaN --e2e-processing-latency-window-time=0s", []string{`"NaN"`}},
		{"--e2e-processing-latency-window-time=0s", []string{"window-time 0s"}},
		{"--statsd-address=no:wh:ere --statsd-interval=0s --statsd-udp-packet-size=0", []string{`"no:wh:ere"`, "--statsd-interval 0s", "--statsd-udp-packet-size 0"}},
		{"--data-path=/does/not/exist --max-bytes-per-file=0 --sync-every=0 --sync-timeout=0s", []string{"--data-path", "--max-bytes-per-file 0", "--sync-every 0", "--sync-timeout 0s"}},
		{"--data-path=options.go", []string{"not a folder"}},
		{"--node-id=1024", []string{"--node-id 1024"}},
		{"--id=-1", []string{"--node-id -1"}},
		{"--worker-id=x", []string{`"x"`}},
		{"--enable-experiment=teleport", []string{`"teleport"`}},
		{"--enable-experiment=topology-aware-consumption --topology-zone=z", []string{`--topology-zone "z"`}},
		{"--auth-http-address=nowhere --auth-http-request-method=put", []string{`"nowhere"`, `"PUT"`}},
		{"--auth-http-address=", []string{"empty"}},
		{"--auth-http-address=a:1 --http-client-connect-timeout=0s --http-client-request-timeout=-1s", []string{"--http-client-connect-timeout 0s", "--http-client-request-timeout -1s"}},
		{"--config=/does/not/exist", []string{"/does/not/exist"}},
	} {
		_, err := parse(strings.Fields(c.args)...)
		if err == nil {
			t.Errorf("%s: accepted", c.args)
			continue
		}
		for fault := range strings.Lines(err.Error()) {
			if !strings.Contains(fault, "--") {
				t.Errorf("%s: a fault names no flag: %s", c.args, fault)
			}
		}
		for _, want := range c.want {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%s: %q does not name %q", c.args, err, want)
			}
		}
	}
}

func TestTheFileSetsWhatTheCommandLineDoesNot(t *testing.T) {
	path := filepath.Join(t.TempDir(), "nsqd.toml")
	write := func(text string) {
		testkit.Must(t, os.WriteFile(path, []byte(text), 0o600))
	}
	write(`
tcp_address = "127.0.0.1:1"
mem-queue-size = 7
msg_timeout = "3s"
tls_required = false
e2e_processing_latency_percentiles = [1.0, 0.99]
log_level = "Error"
nsqlookupd_tcp_addresses = ["l", "l:2"]
auth_http_addresses = ["a:1", "http://b:2/x"]
tls_min_version = ""
snappy = false
topic-limit = ["a:1:1", "b:2.5:2:reject"]
`)
	o, err := parse("--config", path, "--tcp-address", "127.0.0.1:2")
	testkit.Must(t, err)
	if o.addresses.tcp != "127.0.0.1:2" || o.broker.Capacity != 7 || o.session.MsgTimeout != 3*time.Second {
		t.Errorf("%+v", o)
	}
	if o.tls.required != tlsOptional || o.tls.minVersion != tls10 || o.session.Snappy || !o.session.Deflate {
		t.Errorf("%+v", o)
	}
	if !slices.Equal(o.auth.Addresses, []string{"a:1", "http://b:2/x"}) || o.authServers == nil {
		t.Errorf("auth servers %v", o.auth.Addresses)
	}
	testkit.Equal(t, strings.Join(o.lookupds, ","), "l:4160,l:2")
	if !slices.Equal(o.statsd.Percentiles, []float64{1, 0.99}) || o.broker.EndToEnd != 10*time.Minute {
		t.Errorf("%v %v", o.statsd.Percentiles, o.broker.EndToEnd)
	}
	if len(o.broker.Presets) != 2 || o.broker.Presets["b"].RateMilli != 2500 || !o.broker.Presets["b"].Reject {
		t.Errorf("topic limits %+v", o.broker.Presets)
	}
	for text, want := range map[string]string{
		"nonsense = 1":           `"nonsense"`,
		"config = 'x'":           `"config"`,
		"mem_queue_size = 'x'":   "mem_queue_size",
		"this is not TOML":       path,
		"tcp_address = 1\na=1\n": `"a"`,
	} {
		write(text)
		if _, err := parse("--config", path); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v does not name %s", text, err, want)
		}
	}
}

// Our nsqd accepts each flag of NSQ's nsqd with the same default. The list is from NSQ's documentation.
func TestEveryFlagOfNSQ(t *testing.T) {
	var o options
	fs := flag.NewFlagSet("nsqd", flag.ContinueOnError)
	for _, g := range o.program().Groups {
		g.Flags(fs)
	}
	for name, want := range map[string]string{
		"auth-http-address": "", "auth-http-request-method": "get", "broadcast-address": "", "broadcast-http-port": "0", "broadcast-tcp-port": "0",
		"data-path": "", "deflate": "true", "e2e-processing-latency-percentile": "", "e2e-processing-latency-window-time": "10m0s",
		"http-address": "0.0.0.0:4151", "http-client-connect-timeout": "2s", "http-client-request-timeout": "5s", "https-address": "0.0.0.0:4152",
		"log-prefix": "[nsqd] ", "lookupd-tcp-address": "", "max-body-size": "5242880", "max-bytes-per-file": "104857600",
		"max-channel-consumers": "0", "max-deflate-level": "6", "max-heartbeat-interval": "1m0s", "max-msg-size": "1048576", "max-msg-timeout": "15m0s",
		"max-output-buffer-size": "65536", "max-output-buffer-timeout": "30s", "max-rdy-count": "2500", "max-req-timeout": "1h0m0s",
		"mem-queue-size": "10000", "min-output-buffer-timeout": "25ms", "msg-timeout": "1m0s", "output-buffer-timeout": "250ms",
		"queue-scan-selection-count": "20", "queue-scan-worker-pool-max": "4", "snappy": "true", "statsd-address": "",
		"statsd-exclude-ephemeral": "false", "statsd-interval": "1m0s", "statsd-mem-stats": "true", "statsd-prefix": "nsq.%s", "statsd-udp-packet-size": "508",
		"sync-every": "2500", "sync-timeout": "2s", "tcp-address": "0.0.0.0:4150", "tls-cert": "", "tls-client-auth-policy": "", "tls-key": "",
		"tls-min-version": "tls1.0", "tls-required": "false", "tls-root-ca-file": "", "verbose": "false", "worker-id": "",
	} {
		f := fs.Lookup(name)
		if f == nil {
			t.Errorf("--%s is missing", name)
		} else if f.DefValue != want {
			t.Errorf("--%s is %q by default, want %q", name, f.DefValue, want)
		}
	}
	for _, args := range []string{"--worker-id", "--worker-id=5", "--verbose", "--id=7", "--node-id=1023", "--log-prefix=x", "--log-level=FATAL"} {
		if _, err := parse(strings.Fields(args)...); err != nil {
			t.Errorf("%s: %v", args, err)
		}
	}
}

func TestMemoryLimit(t *testing.T) {
	root := fstest.MapFS{"proc/meminfo": &fstest.MapFile{Data: []byte("MemTotal: 4000 kB\n")}}
	for _, c := range []struct {
		flag int64
		env  string
		want int64
	}{
		{0, "", 3000 << 10}, {5000, "", 5000}, {5000, "1GiB", 0}, {0, "off", 0},
	} {
		testkit.Equal(t, softLimit(c.flag, c.env, root), c.want, "--memory-limit=%d, GOMEMLIMIT=%q", c.flag, c.env)
	}
}
