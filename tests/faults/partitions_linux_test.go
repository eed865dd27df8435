package faults

import (
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/etcdtest"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
	"github.com/srtm-io/srtm/tokenbucket"
)

// inside is the environment variable of a process that runs a test in its own network namespace.
const inside = "SRTM_FAULTS_INSIDE"

// separate is a set of machines. Each machine is a network namespace with a name. The test itself runs
// on a further machine.
type separate struct {
	t       *testing.T
	network *testkit.Network
	at      map[string]netip.Addr // by machine
	names   map[string]testkit.Namespace
	dir     string // of the scripts
}

func newSeparate(t *testing.T) *separate {
	s := &separate{t: t, network: testkit.NewNetwork(t, testkit.Rand(t)), at: map[string]netip.Addr{}, names: map[string]testkit.Namespace{}, dir: t.TempDir()}
	s.network.JoinSelf()
	return s
}

func (s *separate) join(machine string) netip.Addr {
	if _, is := s.at[machine]; !is {
		s.names[machine] = testkit.NewNamespace(s.t)
		s.at[machine] = s.network.Join(s.names[machine])
	}
	return s.at[machine]
}

// program writes a script that runs the program in the machine's namespace. The script replaces itself
// by the program, so the process keeps its id.
func (s *separate) program(machine, pkg string) string {
	s.t.Helper()
	host := s.join(machine)
	path := filepath.Join(s.dir, machine+"-"+pkg)
	more := "--allow-insecure-listen"
	if pkg == "nsqd" {
		more = "--broadcast-address=" + host.String()
	}
	script := fmt.Sprintf("#!/bin/sh\nexec ip netns exec %s %s \"$@\" %s\n", s.names[machine].Name, localtest.Program(s.t, pkg), more)
	testkit.Must(s.t, os.WriteFile(path, []byte(script), 0o700))
	return path
}

func (s *separate) address(machine, free string) string {
	_, port, err := net.SplitHostPort(free)
	testkit.Must(s.t, err)
	return net.JoinHostPort(s.join(machine).String(), port)
}

func (s *separate) proxy(string) *local.Proxy { return nil }

// partition cuts links between a pair of machines.
type partition struct {
	one, other  string
	there, back bool // the cut directions
	lasts       time.Duration
}

func (p partition) String() string {
	way := map[[2]bool]string{{true, false}: "→", {false, true}: "←", {true, true}: "↔"}[[2]bool{p.there, p.back}]
	return fmt.Sprintf("%s %s %s for %v", p.one, way, p.other, p.lasts)
}

func (s *separate) set(p partition, cut bool, base testkit.Link) {
	for _, d := range []struct {
		cut      bool
		from, to netip.Addr
	}{{p.there, s.at[p.one], s.at[p.other]}, {p.back, s.at[p.other], s.at[p.one]}} {
		l := base
		l.Cut = cut && d.cut
		s.network.Set(d.from, d.to, l)
	}
}

// alone runs the test in a process with a new network namespace. It returns true in that process.
func alone(t *testing.T) (child bool) {
	t.Helper()
	if os.Getenv(inside) != "" {
		testkit.IP(t, "link", "set", "lo", "up")
		return true
	}
	if _, err := exec.LookPath("ip"); err != nil || os.Getuid() != 0 {
		t.Skip("network namespaces take root, and ip of iproute2")
	}
	if _, err := os.Stat(testkit.TUN); err != nil {
		t.Skipf("no TUN device: %v", err)
	}
	args := []string{"-test.run=^" + strings.ReplaceAll(t.Name(), "/", "$/^") + "$", "-test.count=1", "-test.timeout=1h"}
	if testing.Verbose() {
		args = append(args, "-test.v")
	}
	cmd := exec.Command(os.Args[0], args...)
	cmd.Env = append(os.Environ(), inside+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr // at once: a run that is interrupted has shown its findings
	runtime.LockOSThread()                        // the parent-death signal follows the thread
	defer runtime.UnlockOSThread()
	if err := cmd.Start(); err != nil {
		t.Skipf("no network namespace can be made here: %v", err)
	}
	testkit.NoError(t, cmd.Wait())
	return false
}

// processes returns the running processes by machine.
func (c *cluster) processes() map[string]*local.Process {
	all := map[string]*local.Process{"control": c.control}
	if c.adaptor != nil {
		all["adaptor"] = c.adaptor
	}
	for _, b := range c.brokers {
		all[b.name] = b.process
	}
	return all
}

// webs returns the HTTP addresses of the processes by machine.
func (c *cluster) webs() map[string]string {
	all := map[string]string{"control": c.web}
	if c.apart {
		all["adaptor"] = c.adaptorWeb
	}
	for _, b := range c.brokers {
		all[b.name] = b.web
	}
	return all
}

// health returns a process's answer about its health.
func health(web string) string {
	text, code, err := localtest.Ask(http.MethodGet, "http://"+web+"/healthz", "")
	if err != nil {
		return err.Error()
	}
	return fmt.Sprintf("%d %s", code, strings.TrimSpace(text))
}

// maxLines bounds the log lines of a process about one partition.
const maxLines = 20

// part makes a partition, changes the contract during the partition, ends the partition, and waits
// until all processes work as before.
func (c *cluster) part(s *separate, a *administration, p partition, base testkit.Link) {
	t := c.t
	t.Helper()
	before := map[string]int{}
	for name, process := range c.processes() {
		before[name] = len(process.AllOutput())
	}
	s.set(p, true, base)
	began := time.Now()
	lower := tokenbucket.Share{Rate: rate / 2 * 1000, Burst: burst / 2}
	wait(p.lasts / 2)
	changed := a.update(lower)
	former := len(a.promises.last().former)
	answers := map[string]string{}
	for name, web := range c.webs() {
		answers[name] = health(web)
	}
	wait(p.lasts - time.Since(began))
	s.set(p, false, base)
	ended := time.Now()
	restored := fixed()[0].contract
	testkit.WaitFor(t, fmt.Sprint(p, ": the contract is restored"), func() bool { return a.update(restored) == nil })
	testkit.WaitFor(t, fmt.Sprint(p, ": the brokers hold the whole contract"), func() bool { return restoredTo(c.shares(), restored) })
	took := time.Since(ended)
	c.flows(rate / 2)
	var lines []string
	for name, process := range c.processes() {
		if err := process.Died(); err != nil {
			t.Errorf("%v: %s: %v", p, name, err)
			continue
		}
		text := process.AllOutput()
		text = withoutClients(text[min(before[name], len(text)):])
		if n := strings.Count(text, "\n"); n > maxLines {
			t.Errorf("%v: %s logged %d lines:\n%s", p, name, n, text)
		} else if n > 0 {
			lines = append(lines, fmt.Sprintf("%s:\n%s", name, text))
		}
	}
	slices.Sort(lines)
	t.Logf("%v: update during the partition: %v, which names %d brokers; healed after %v; health: %v; log:\n%s",
		p, changed, former, took.Round(10*time.Millisecond), answers, strings.Join(lines, ""))
}

// restoredTo reports whether the brokers that carry the topic are connected and together hold the
// contract. The brokers may differ from the brokers before the partition.
func restoredTo(s *srtmv1.TopicShares, contract tokenbucket.Share) bool {
	var sum tokenbucket.Share
	for _, m := range s.Members {
		if !m.Connected {
			return false
		}
		sum.Rate += tokenbucket.Rate(m.GetAcknowledged().GetRateMilli())
		sum.Burst += m.GetAcknowledged().GetBurst()
	}
	return sum == contract
}

// withoutClients removes the log lines about this test's clients. The clients publish and subscribe at
// brokers that no longer carry the topic, and reconnect at once. nsqd bounds these lines by kind.
func withoutClients(text string) string {
	var own strings.Builder
	for line := range strings.Lines(text) {
		if !strings.Contains(line, "connection closed") && !strings.Contains(line, "a topic that a client subscribes to") {
			own.WriteString(line)
		}
	}
	return own.String()
}

// deployment is a way to run a cluster, and the pairs of machines whose links are cut.
type deployment struct {
	apart, etcd, jetstream bool
	pairs                  [][2]string
}

// startSeparate starts the cluster with each process on its own machine.
func startSeparate(t *testing.T, s *separate, d deployment) *cluster {
	t.Helper()
	c := &cluster{t: t, dir: t.TempDir(), leases: shortLeases, apart: d.apart, placement: "loadbalance", mcap: rate + 100, machines: s}
	c.store = []string{"--data-path=" + c.dir}
	if d.etcd {
		s.at["etcd"] = s.network.JoinSelf()
		e := etcdtest.Start(t, etcdtest.Config{Address: s.address("etcd", localtest.Ports(t, 1)[0])})
		c.store = []string{"--store=etcd", "--etcd-endpoint=" + e.URL, "--etcd-lease=2s"}
	}
	if d.jetstream {
		s.at["jetstream"] = s.network.JoinSelf()
		c.durable = []string{"--durability=replicated", "--jetstream-replicas=1", "--jetstream-url=" + startJetStream(t, s.at["jetstream"])}
	}
	c.start([]string{"available", "strict", "available"})
	return c
}

// startJetStream runs a NATS server with JetStream at an address of this process, and returns its URL.
func startJetStream(t *testing.T, at netip.Addr) (url string) {
	t.Helper()
	n := testkit.Result(server.NewServer(&server.Options{Host: at.String(), Port: server.RANDOM_PORT, NoSigs: true, NoLog: true, MaxPayload: 8 << 20, JetStream: true, StoreDir: t.TempDir()})).Must(t)
	n.Start()
	t.Cleanup(func() {
		n.Shutdown()
		n.WaitForShutdown()
	})
	testkit.WaitFor(t, "JetStream", func() bool { return n.ReadyForConnections(time.Second) && n.JetStreamEnabled() })
	return n.ClientURL()
}

// Links between two machines are cut in one direction or both, for shorter and for longer than the
// leases. No accepted message is lost, the contract is kept, and all processes work as before soon
// after, without a restart. A short run draws two cuts for each deployment. A long run (make faults)
// makes all cuts, and makes them again on a network with 50 ms of delay and 1 % of loss.
func TestPartitionsLoseNoMessage(t *testing.T) {
	long := os.Getenv(longer) != ""
	lengths := []time.Duration{time.Second, 3 * time.Second} // sessions last 2 s
	if long {
		lengths[1] = 8 * time.Second // gRPC gives up connections after fewer seconds
	}
	ways := [][2]bool{{true, false}, {false, true}, {true, true}}
	for name, d := range map[string]deployment{
		"embedded":  {pairs: [][2]string{{"b0", "control"}, {"b1", "control"}}},
		"daemon":    {apart: true, pairs: [][2]string{{"b0", "control"}, {"b0", "adaptor"}, {"b1", "adaptor"}, {"control", "adaptor"}}},
		"etcd":      {etcd: true, pairs: [][2]string{{"control", "etcd"}, {"b0", "control"}}},
		"jetstream": {jetstream: true, pairs: [][2]string{{"b0", "jetstream"}, {"b1", "jetstream"}, {"b0", "control"}}},
	} {
		t.Run(name, func(t *testing.T) {
			if !long {
				t.Parallel()
			}
			if !alone(t) {
				return
			}
			s := newSeparate(t)
			c := startSeparate(t, s, d)
			a, stop := c.beginWith(rate * 6 / 5)
			rng := testkit.Rand(t)
			cuts := func(pairs [][2]string, base testkit.Link) {
				s.network.SetAll(base)
				for _, pair := range pairs {
					way, length := rng.IntN(len(ways)), rng.IntN(len(lengths))
					for i, cut := range ways {
						for j, lasts := range lengths {
							if long || i == way && j == length {
								c.part(s, a, partition{pair[0], pair[1], cut[0], cut[1], lasts}, base)
							}
						}
					}
				}
			}
			if long {
				cuts(d.pairs, testkit.Link{})
				cuts(d.pairs, testkit.Link{Delay: 25 * time.Millisecond, Loss: 0.01})
			} else {
				rng.Shuffle(len(d.pairs), func(i, j int) { d.pairs[i], d.pairs[j] = d.pairs[j], d.pairs[i] })
				cuts(d.pairs[:2], testkit.Link{})
			}
			s.network.SetAll(testkit.Link{})
			lost, overflow := s.network.Dropped()
			t.Logf("%d packets lost; %d dropped because a queue was full", lost, overflow)
			c.settle(stop, a.promises)
		})
	}
}
