package conformance

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
)

// call runs the nsqd until it exits.
func call(t *testing.T, args ...string) (output string, err error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, program(t, args...), args...)
	cmd.Dir = t.TempDir()
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err = cmd.Run()
	return out.String(), err
}

// startFails checks that an nsqd with these flags exits by itself, reports the cause, and has a
// failure exit code.
func startFails(t *testing.T, flags ...string) {
	t.Helper()
	free := localtest.Ports(t, 2)
	output, err := call(t, append([]string{"--tcp-address=" + free[0], "--http-address=" + free[1]}, flags...)...)
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() <= 0 {
		t.Errorf("with %q: %v, want an exit code above 0", flags, err)
	}
	if strings.TrimSpace(output) == "" {
		t.Errorf("with %q it says nothing", flags)
	}
}

// documented are the documented flags with their defaults.
var documented = map[string]string{
	"broadcast-address":                  "localhost",
	"broadcast-http-port":                "0",
	"broadcast-tcp-port":                 "0",
	"data-path":                          "",
	"deflate":                            "true",
	"e2e-processing-latency-percentile":  "0.99,0.95",
	"e2e-processing-latency-window-time": "10m0s",
	"http-address":                       "0.0.0.0:4151",
	"http-client-connect-timeout":        "2s",
	"http-client-request-timeout":        "5s",
	"https-address":                      "0.0.0.0:4152",
	"log-level":                          "info",
	"log-prefix":                         "[nsqd] ",
	"lookupd-tcp-address":                "127.0.0.1:4160",
	"auth-http-address":                  "127.0.0.1:4181",
	"max-body-size":                      "5242880",
	"max-bytes-per-file":                 "104857600",
	"max-channel-consumers":              "0",
	"max-deflate-level":                  "6",
	"max-heartbeat-interval":             "1m0s",
	"max-msg-size":                       "1048576",
	"max-msg-timeout":                    "15m0s",
	"max-output-buffer-size":             "65536",
	"max-output-buffer-timeout":          "30s",
	"max-rdy-count":                      "2500",
	"max-req-timeout":                    "1h0m0s",
	"mem-queue-size":                     "10000",
	"min-output-buffer-timeout":          "25ms",
	"msg-timeout":                        "1m0s",
	"node-id":                            "248",
	"output-buffer-timeout":              "250ms",
	"queue-scan-selection-count":         "20",
	"queue-scan-worker-pool-max":         "4",
	"snappy":                             "true",
	"statsd-address":                     "127.0.0.1:8125",
	"statsd-exclude-ephemeral":           "false",
	"statsd-interval":                    "1m0s",
	"statsd-mem-stats":                   "true",
	"statsd-prefix":                      "nsq.%s",
	"statsd-udp-packet-size":             "508",
	"sync-every":                         "2500",
	"sync-timeout":                       "2s",
	"tcp-address":                        "0.0.0.0:4150",
	"tls-cert":                           "",
	"tls-client-auth-policy":             "",
	"tls-key":                            "",
	"tls-min-version":                    "tls1.0",
	"tls-required":                       "false",
	"tls-root-ca-file":                   "",
	"verbose":                            "false",
	"worker-id":                          "false",
}

func TestFlags(t *testing.T) {
	group(t)
	check(t, "version", func(t *testing.T) {
		if out, err := call(t, "--version"); err != nil || !regexp.MustCompile(`^nsqd v1\.\d+\.\d+\S* \(built w/go\S+\)\n`).MatchString(out) {
			t.Errorf("got %q, %v", out, err)
		}
	})
	for name := range documented {
		check(t, name, func(t *testing.T) {
			for _, dashes := range []string{"-", "--"} {
				if out, err := call(t, dashes+name+"="+documented[name], "--version"); err != nil {
					t.Errorf("%v: %.300s", err, out)
				}
			}
		})
	}
	check(t, "unknown flag", func(t *testing.T) { startFails(t, "--no-such-flag=1") })
	check(t, "value of a wrong type", func(t *testing.T) { startFails(t, "--max-msg-size=big") })
	check(t, "address in use", func(t *testing.T) {
		n := start(t)
		startFails(t, "--tcp-address="+n.tcp)
		startFails(t, "--http-address="+n.http)
	})
	check(t, "config that does not exist", func(t *testing.T) { startFails(t, "--config=/does/not/exist.cfg") })
	check(t, "config that is not TOML", func(t *testing.T) {
		path := testkit.File(t, "nsqd.cfg", "= nonsense [")
		startFails(t, "--config="+path)
	})
	check(t, "config", func(t *testing.T) {
		text := "# as in the example of the distribution\nmsg_timeout = \"3s\"\nmax_msg_size = 1000\nmax_rdy_count = 7\nlog_level = \"warn\"\n"
		path := testkit.File(t, "nsqd.cfg", text)
		n := start(t, "--config="+path, "--max-rdy-count=8")
		answer := n.open(t).identify(nil)
		if answer["msg_timeout"] != 3000.0 || answer["max_rdy_count"] != 8.0 {
			t.Errorf("got %v", answer)
		}
		p := n.open(t)
		p.raw(claimed("PUB t", 1001, ""))
		p.fatal("E_BAD_MESSAGE")
	})
	check(t, "lists in config", func(t *testing.T) {
		a, b := newRegistry(t), newRegistry(t)
		text := fmt.Sprintf("nsqlookupd_tcp_addresses = [%q, %q]\n", a.ln.Addr(), b.ln.Addr())
		path := testkit.File(t, "nsqd.cfg", text)
		start(t, "--config="+path)
		a.receives(0, "IDENTIFY")
		b.receives(0, "IDENTIFY")
	})
}

// A program that starts an nsqd on ports of the system's choice reads the ports in nsqd's log.
func TestPortsOfTheSystem(t *testing.T) {
	group(t)
	check(t, "in the log, in /info and in the registration", func(t *testing.T) {
		r := newRegistry(t)
		dir := t.TempDir()
		cert := testkit.NewAuthority(t).Certificate("nsqd")
		d, at, err := local.Listening(program(t), dir, []string{
			"--tcp-address=127.0.0.1:0", "--http-address=127.0.0.1:0", "--https-address=127.0.0.1:0",
			"--tls-cert=" + cert.CertFile, "--tls-key=" + cert.KeyFile, "--broadcast-address=127.0.0.1", r.flag(),
		}, "TCP", "HTTP", "HTTPS")
		testkit.Must(t, err)
		n := &node{tcp: d.TCP, http: d.HTTP, process: d}
		t.Cleanup(func() {
			testkit.NoError(t, n.end())
		})
		if !regexp.MustCompile(`\bnsqd v1\.\d+\.\d+\S* \(built w/go`).MatchString(d.Output()) {
			t.Errorf("no version in %s", d.Output())
		}
		n.publish(t, "t", "x")
		by := &http.Transport{DisableKeepAlives: true, TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}
		if r, err := fetchBy(by, http.MethodGet, "https://"+at["HTTPS"]+"/ping", nil); err != nil || r.body != "OK" {
			t.Errorf("HTTPS: %+v, %v", r, err)
		}
		r.receives(0, "REGISTER t")
		for where, info := range map[string]map[string]any{"info": n.get(t, "/info").object(t), "registration": r.identity()} {
			if got := fmt.Sprintf("127.0.0.1:%v 127.0.0.1:%v", info["tcp_port"], info["http_port"]); got != n.tcp+" "+n.http {
				t.Errorf("%s: %s, want %s %s", where, got, n.tcp, n.http)
			}
		}
	})
}

func TestUnixSockets(t *testing.T) {
	group(t)
	check(t, "for clients and HTTP", func(t *testing.T) {
		dir, err := os.MkdirTemp("", "c") // the path of a socket must be short
		testkit.Must(t, err)
		t.Cleanup(func() { os.RemoveAll(dir) })
		tcp, web := filepath.Join(dir, "tcp"), filepath.Join(dir, "http")
		by := &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", web)
		}}
		d, err := local.Run(program(t), dir, []string{"--tcp-address=" + tcp, "--http-address=" + web, "--broadcast-address=127.0.0.1"}, func() error {
			_, err := fetchBy(by, http.MethodGet, "http://unix/ping", nil)
			return err
		})
		testkit.Must(t, err)
		n := &node{process: d}
		t.Cleanup(func() {
			testkit.NoError(t, n.end())
		})
		p := dialTo(t, "unix", tcp)
		p.send("  V2")
		p.sub("t", "ch").rdy(1)
		if r, err := fetchBy(by, http.MethodPost, "http://unix/pub?topic=t", []byte("x")); err != nil || r.body != "OK" {
			t.Fatalf("%+v, %v", r, err)
		}
		p.fin(p.body("x").id)
	})
}

func TestStatsd(t *testing.T) {
	group(t)
	check(t, "pushes counters and gauges", func(t *testing.T) {
		conn, err := net.ListenPacket("udp", "127.0.0.1:0")
		testkit.Must(t, err)
		defer conn.Close()
		n := start(t, "--statsd-address="+conn.LocalAddr().String(), "--statsd-interval=2s", "--statsd-prefix=pre.%s")
		c := n.consumer(t, "top", "ch").rdy(1)
		n.publish(t, "top", "12345", "6")
		c.message()
		_, port, _ := net.SplitHostPort(n.http)
		prefix := "pre.127_0_0_1_" + port + "."
		missing := map[string]bool{
			"topic.top.message_count:2|c":              true,
			"topic.top.message_bytes:6|c":              true,
			"topic.top.depth:0|g":                      true,
			"topic.top.backend_depth:0|g":              true,
			"topic.top.channel.ch.message_count:2|c":   true,
			"topic.top.channel.ch.depth:1|g":           true,
			"topic.top.channel.ch.backend_depth:0|g":   true,
			"topic.top.channel.ch.in_flight_count:1|g": true,
			"topic.top.channel.ch.deferred_count:0|g":  true,
			"topic.top.channel.ch.requeue_count:0|c":   true,
			"topic.top.channel.ch.timeout_count:0|c":   true,
			"topic.top.channel.ch.clients:1|g":         true,
			"mem.heap_objects":                         true,
			"mem.heap_idle_bytes":                      true,
			"mem.heap_in_use_bytes":                    true,
			"mem.heap_released_bytes":                  true,
			"mem.gc_pause_usec_100":                    true,
			"mem.gc_pause_usec_99":                     true,
			"mem.gc_pause_usec_95":                     true,
			"mem.next_gc_bytes":                        true,
			"mem.gc_runs":                              true,
		}
		var lines []string
		buf := make([]byte, 64<<10)
		testkit.Must(t, conn.SetReadDeadline(time.Now().Add(patience)))
		for len(missing) > 0 {
			size, _, err := conn.ReadFrom(buf)
			if err != nil {
				t.Fatalf("missing: %v of %q: %v", missing, lines, err)
			}
			if size > 508 {
				t.Errorf("packet of %d bytes", size)
			}
			for line := range strings.Lines(string(buf[:size])) {
				line = strings.TrimSpace(line)
				lines = append(lines, line)
				rest, ours := strings.CutPrefix(line, prefix)
				if !ours {
					t.Errorf("line %q does not begin with %q", line, prefix)
				}
				delete(missing, rest)
				if name, _, is := strings.Cut(rest, ":"); is && strings.HasPrefix(name, "mem.") {
					delete(missing, name)
				}
			}
		}
	})
}

func TestEndToEndLatency(t *testing.T) {
	group(t)
	check(t, "percentiles in stats", func(t *testing.T) {
		n := start(t, "--e2e-processing-latency-percentile=1.0,0.5")
		c := n.consumer(t, "t", "ch").rdy(10)
		n.publish(t, "t", numbered(10)...)
		c.bodies(10)
		testkit.WaitUntil(t, func() string {
			topic := n.get(t, "/stats?format=json&topic=t").object(t)["topics"].([]any)[0].(map[string]any)
			channel := topic["channels"].([]any)[0].(map[string]any)
			for _, o := range []map[string]any{topic, channel} {
				latency := o["e2e_processing_latency"].(map[string]any)
				percentiles, _ := latency["percentiles"].([]any)
				if latency["count"] != 10.0 || len(percentiles) != 2 {
					return fmt.Sprintf("got %v", latency)
				}
				for _, p := range percentiles {
					p := p.(map[string]any)
					value, _ := p["value"].(float64)
					quantile, _ := p["quantile"].(float64)
					if value <= 0 || value > float64(time.Hour) || quantile != 1 && quantile != 0.5 {
						return fmt.Sprintf("got %v", p)
					}
				}
			}
			return ""
		})
	})
}

// understands reports whether the nsqd knows a flag that is newer than 1.3.0.
func understands(t *testing.T, flag string) bool {
	t.Helper()
	_, err := call(t, flag, "--version")
	return err == nil
}

// The documentation is ahead of the release here.
func TestTopology(t *testing.T) {
	group(t)
	const experiment = "--enable-experiment=topology-aware-consumption"
	check(t, "the nearest consumer that is ready", func(t *testing.T) {
		if !under.srtm && !understands(t, experiment) {
			t.Skip("this nsqd is older than topology-aware consumption")
		}
		n := start(t, experiment, "--topology-region=r1", "--topology-zone=z1")
		from := func(region, zone string) *peer {
			p := n.open(t)
			p.identify(map[string]any{"client_id": region + zone, "topology_region": region, "topology_zone": zone, "output_buffer_timeout": 25})
			return p.sub("t", "ch").rdy(1000)
		}
		from("r2", "z9")
		region, zone := from("r1", "z2"), from("r1", "z1")
		n.settle(t, "t", "ch", func(s channelStats) bool {
			ready := 0
			for _, c := range s.Clients {
				ready += c.ReadyCount
			}
			return ready == 3000
		})
		// most checks that one consumer gets nearly all messages: upstream's nsqd gives a message to
		// another consumer when the nearest is busy for a moment.
		const messages = 100
		most := func(id string) {
			t.Helper()
			before := map[string]int{}
			s, _ := mustLookup(t, n, "t").channel("ch")
			for _, c := range s.Clients {
				before[c.ClientID] = c.InFlightCount
			}
			goal := s.InFlight + messages
			for i := range messages {
				n.publish(t, "t", fmt.Sprint(i))
			}
			n.settle(t, "t", "ch", func(s channelStats) bool { return s.InFlight == goal })
			s, _ = mustLookup(t, n, "t").channel("ch")
			for _, c := range s.Clients {
				if got := c.InFlightCount - before[c.ClientID]; c.ClientID == id && got < messages*3/4 {
					t.Errorf("%s got %d of %d: %+v", id, got, messages, s.Clients)
				}
			}
		}
		most("r1z1")
		zone.rdy(0)
		n.settle(t, "t", "ch", func(s channelStats) bool {
			return slices.ContainsFunc(s.Clients, func(c clientStats) bool { return c.ReadyCount == 0 })
		})
		most("r1z2")
		region.rdy(0)
		n.settle(t, "t", "ch", func(s channelStats) bool {
			zero := 0
			for _, c := range s.Clients {
				if c.ReadyCount == 0 {
					zero++
				}
			}
			return zero == 2
		})
		most("r2z9")
	})
}

func TestMaxDeferTimeout(t *testing.T) {
	group(t)
	const flag = "--max-defer-timeout=2s"
	check(t, "limits deferred publishes, not requeues", func(t *testing.T) {
		if !under.srtm && !understands(t, flag) {
			t.Skip("this nsqd is older than --max-defer-timeout")
		}
		n := start(t, flag)
		n.open(t).dpub("t", 2*time.Second, "x")
		p := n.open(t)
		p.raw(claimed("DPUB t 2001", 1, "x"))
		p.fatal("E_INVALID")
		n.post(t, "/pub?topic=t&defer=2001", "x").refused(t, 400, "INVALID_DEFER")
	})
}
