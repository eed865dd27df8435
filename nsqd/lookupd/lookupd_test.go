package lookupd_test

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/nsqd/lookupd"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func TestLookupd(t *testing.T) {
	RegisterFailHandler(Fail)
	SetDefaultEventuallyTimeout(testkit.Hang)
	RunSpecs(t, "nsqd/lookupd")
}

// daemon is a small nsqlookupd. The daemon answers as nsqlookupd does and keeps the registrations of the connected
// nodes.
type daemon struct {
	ln  net.Listener
	web *httptest.Server // nil: no HTTP server
	wg  sync.WaitGroup

	mu struct {
		sync.Mutex
		said  []string                   // received commands, without PING
		pings int                        // PINGs
		conns map[net.Conn]*registration // open connections
		reply func(command string) string
	}
}

type registration struct {
	node lookupd.Node
	keys []string
}

func startDaemon(address string) *daemon {
	GinkgoHelper()
	d := new(daemon)
	d.mu.conns = make(map[net.Conn]*registration)
	var err error
	d.ln, err = net.Listen("tcp", address)
	Expect(err).NotTo(HaveOccurred())
	d.wg.Go(func() {
		for {
			nc, err := d.ln.Accept()
			if err != nil {
				return
			}
			d.wg.Go(func() { d.serve(nc) })
		}
	})
	DeferCleanup(d.stop)
	return d
}

func (d *daemon) address() string { return d.ln.Addr().String() }

// cut closes every connection.
func (d *daemon) cut() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for nc := range d.mu.conns {
		nc.Close()
	}
}

func (d *daemon) stop() {
	d.ln.Close()
	d.cut()
	d.wg.Wait()
}

func (d *daemon) serve(nc net.Conn) {
	defer nc.Close()
	r := bufio.NewReader(nc)
	magic := make([]byte, 4)
	if _, err := io.ReadFull(r, magic); err != nil || string(magic) != "  V1" {
		return
	}
	reg := new(registration)
	d.mu.Lock()
	d.mu.conns[nc] = reg
	d.mu.Unlock()
	defer func() {
		d.mu.Lock()
		delete(d.mu.conns, nc)
		d.mu.Unlock()
	}()
	for {
		line, err := r.ReadString('\n')
		if err != nil {
			return
		}
		answer, err := d.answer(reg, strings.TrimSuffix(line, "\n"), r)
		if err != nil {
			return
		}
		out := binary.BigEndian.AppendUint32(nil, uint32(len(answer)))
		if _, err := nc.Write(append(out, answer...)); err != nil {
			return
		}
	}
}

func (d *daemon) answer(reg *registration, line string, r io.Reader) (string, error) {
	verb, args, _ := strings.Cut(line, " ")
	if verb == "IDENTIFY" {
		var size [4]byte
		if _, err := io.ReadFull(r, size[:]); err != nil {
			return "", err
		}
		body := make([]byte, binary.BigEndian.Uint32(size[:]))
		if _, err := io.ReadFull(r, body); err != nil {
			return "", err
		}
		if err := json.Unmarshal(body, &reg.node); err != nil {
			return "", err
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if verb == "PING" {
		d.mu.pings++
	} else {
		d.mu.said = append(d.mu.said, line)
	}
	if d.mu.reply != nil {
		if answer := d.mu.reply(line); answer != "" {
			return answer, nil
		}
	}
	switch verb {
	case "IDENTIFY":
		host, port := "", 0
		if d.web != nil {
			a := d.web.Listener.Addr().(*net.TCPAddr)
			host, port = a.IP.String(), a.Port
		}
		return fmt.Sprintf(`{"tcp_port":1,"http_port":%d,"version":"1.3.0","broadcast_address":%q,"hostname":"h"}`, port, host), nil
	case "REGISTER":
		reg.keys = append(reg.keys, args)
	case "UNREGISTER":
		i := slices.Index(reg.keys, args)
		if i < 0 {
			return "E_INVALID was not registered: " + args, nil
		}
		reg.keys = slices.Delete(reg.keys, i, i+1)
	}
	return "OK", nil
}

func (d *daemon) replies(reply func(string) string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.mu.reply = reply
}

// registered returns the registrations of all nodes.
func (d *daemon) registered() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	keys := []string{}
	for _, r := range d.mu.conns {
		keys = append(keys, r.keys...)
	}
	slices.Sort(keys)
	return keys
}

// said returns the commands received since the last call.
func (d *daemon) said() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	said := d.mu.said
	d.mu.said = nil
	return said
}

func (d *daemon) pings() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.mu.pings
}

// catalog has the topics of a node.
type catalog struct {
	mu sync.Mutex
	t  []lookupd.Topic
}

func (c *catalog) set(topics ...lookupd.Topic) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.t = topics
}

func (c *catalog) list() []lookupd.Topic {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.t
}

func topic(name string, channels ...string) lookupd.Topic {
	return lookupd.Topic{Name: name, Channels: channels}
}

var node = lookupd.Node{BroadcastAddress: "node1", Hostname: "h", TCPPort: 4150, HTTPPort: 4151, Version: "test", Zone: "z"}

func config(c *catalog) lookupd.Config {
	return lookupd.Config{
		Node: node, Topics: c.list,
		ConnectTimeout: testkit.Hang, RequestTimeout: testkit.Hang,
		PingInterval: time.Hour, RetryAfter: 10 * time.Millisecond,
		Log: slog.New(slog.NewTextHandler(GinkgoWriter, &slog.HandlerOptions{Level: slog.LevelDebug})),
	}
}

func run(cfg lookupd.Config, addresses ...string) *lookupd.Announcer {
	GinkgoHelper()
	a, err := lookupd.New(cfg, addresses)
	Expect(err).NotTo(HaveOccurred())
	testkit.Run(GinkgoTB(), a.Run)
	return a
}

var _ = Describe("an announcer", func() {
	var c *catalog

	BeforeEach(func() {
		c = new(catalog)
		c.set(topic("t", "b", "a"), topic("u"))
	})

	It("sends a daemon its identity and what there is, and then what changes", func() {
		d := startDaemon("127.0.0.1:0")
		a := run(config(c), d.address())
		Eventually(d.registered).Should(Equal([]string{"t", "t a", "t b", "u"}))
		Expect(d.said()).To(Equal([]string{"IDENTIFY", "REGISTER t", "REGISTER t a", "REGISTER t b", "REGISTER u"}))
		d.mu.Lock()
		for _, r := range d.mu.conns {
			Expect(r.node).To(Equal(node))
		}
		d.mu.Unlock()

		c.set(topic("t", "a", "c#ephemeral"), topic("v", "x"))
		a.Notify()
		Eventually(d.registered).Should(Equal([]string{"t", "t a", "t c#ephemeral", "v", "v x"}))
		Expect(d.said()).To(Equal([]string{"UNREGISTER u", "UNREGISTER t b", "REGISTER t c#ephemeral", "REGISTER v", "REGISTER v x"}))

		c.set()
		a.Notify()
		Eventually(d.registered).Should(BeEmpty())
		Expect(d.said()).To(Equal([]string{"UNREGISTER v x", "UNREGISTER v", "UNREGISTER t c#ephemeral", "UNREGISTER t a", "UNREGISTER t"}))
		Expect(a.State()).To(Equal([]lookupd.State{{Address: d.address(), Connected: true}}))
	})

	It("registers ten thousand topics", func() {
		var many []lookupd.Topic
		for i := range 10_000 {
			many = append(many, topic(fmt.Sprint("t", i), "c"))
		}
		c.set(many...)
		d := startDaemon("127.0.0.1:0")
		run(config(c), d.address())
		Eventually(func() int { return len(d.registered()) }).Should(Equal(20_000))
	})

	It("registers everything again at a daemon that lost it", func() {
		d := startDaemon("127.0.0.1:0")
		a := run(config(c), d.address())
		Eventually(d.registered).Should(HaveLen(4))
		d.said()
		c.set(topic("t"))
		d.cut()
		Eventually(d.registered).Should(Equal([]string{"t"}))
		Expect(d.said()).To(Equal([]string{"IDENTIFY", "REGISTER t"}))
		Eventually(func() uint64 { return a.State()[0].Failures }).Should(BeEquivalentTo(1))
	})

	It("waits for a daemon that is not there yet", func() {
		address := testkit.Address(GinkgoTB())
		a := run(config(c), address)
		Eventually(func() uint64 {
			for _, s := range a.State() {
				Expect(s.Connected).To(BeFalse())
				return s.Failures
			}
			return 0
		}).Should(BeNumerically(">=", 2))
		d := startDaemon(address)
		Eventually(d.registered).Should(HaveLen(4))
	})

	It("keeps in touch while nothing changes", func() {
		d := startDaemon("127.0.0.1:0")
		cfg := config(c)
		cfg.PingInterval = 5 * time.Millisecond
		run(cfg, d.address())
		Eventually(d.pings).Should(BeNumerically(">=", 3))
		Expect(d.registered()).To(HaveLen(4))
	})

	It("informs the daemons it is given at run time, and no others any more", func() {
		d, e := startDaemon("127.0.0.1:0"), startDaemon("127.0.0.1:0")
		a := run(config(c), d.address())
		Eventually(d.registered).Should(HaveLen(4))
		Expect(a.SetAddresses([]string{d.address(), e.address()})).To(Succeed())
		Eventually(e.registered).Should(HaveLen(4))
		Expect(a.SetAddresses([]string{e.address()})).To(Succeed())
		Eventually(d.registered).Should(BeEmpty())
		Expect(a.Addresses()).To(Equal([]string{e.address()}))
		Expect(a.SetAddresses([]string{d.address(), "nonsense", ":"})).To(MatchError(And(ContainSubstring(`"nonsense"`), ContainSubstring(`":"`))))
		Expect(a.Addresses()).To(Equal([]string{e.address()}))
		Expect(a.SetAddresses(nil)).To(Succeed())
		Eventually(e.registered).Should(BeEmpty())
		Eventually(a.State).Should(BeEmpty())
		c.set(topic("t"))
		a.Notify()
	})

	DescribeTable("leaves a daemon that talks nonsense, and comes back",
		func(reply func(command string) string, want string) {
			d := startDaemon("127.0.0.1:0")
			d.replies(reply)
			log := new(testkit.Buffer)
			cfg := config(c)
			cfg.Log = slog.New(slog.NewTextHandler(log, nil))
			run(cfg, d.address())
			Eventually(log.String).Should(ContainSubstring(want))
			d.replies(nil)
			Eventually(d.registered).Should(HaveLen(4))
		},
		Entry("an error", func(c string) string {
			if c == "REGISTER t a" {
				return "E_BAD_CHANNEL no"
			}
			return ""
		}, `REGISTER t a: answers \"E_BAD_CHANNEL no\"`),
		Entry("an identity that is no JSON", func(c string) string {
			if c == "IDENTIFY" {
				return "E_BAD_BODY missing fields"
			}
			return ""
		}, `answers IDENTIFY with \"E_BAD_BODY missing fields\"`),
		Entry("an identity with an impossible port", func(c string) string {
			if c == "IDENTIFY" {
				return `{"http_port":70000}`
			}
			return ""
		}, "HTTP port 70000"),
		Entry("an answer too large", func(string) string { return strings.Repeat("x", 1<<17) }, "answer of 131072 bytes is longer"),
	)

	DescribeTable("leaves a peer that is no daemon",
		func(talk []byte, want string) {
			ln, err := net.Listen("tcp", "127.0.0.1:0")
			Expect(err).NotTo(HaveOccurred())
			var wg sync.WaitGroup
			wg.Go(func() {
				for {
					nc, err := ln.Accept()
					if err != nil {
						return
					}
					wg.Go(func() {
						defer nc.Close()
						_, _ = nc.Write(talk)
						_, _ = io.Copy(io.Discard, nc)
					})
				}
			})
			DeferCleanup(func() {
				ln.Close()
				wg.Wait()
			})
			log := new(testkit.Buffer)
			cfg := config(c)
			cfg.Log = slog.New(slog.NewTextHandler(log, nil))
			if talk == nil { // otherwise the answer must arrive, even on a busy machine
				cfg.RequestTimeout = 20 * time.Millisecond
			}
			run(cfg, ln.Addr().String())
			Eventually(log.String).Should(ContainSubstring(want))
		},
		Entry("sends nothing", nil, "no answer within 20ms"),
		Entry("speaks HTTP", []byte("HTTP/1.1 400 Bad Request\r\n\r\n"), "is longer than"),
		Entry("sends more answers than it got commands", append([]byte("\x00\x00\x00\x02{}"), strings.Repeat("\x00\x00\x00\x02OK", 200)...), "without a request"),
	)

	It("ends at once, whatever a daemon does", func() {
		ln, err := net.Listen("tcp", "127.0.0.1:0") // the backlog accepts the connection, and the daemon never answers
		Expect(err).NotTo(HaveOccurred())
		DeferCleanup(ln.Close)
		cfg := config(c)
		cfg.RequestTimeout = time.Hour
		run(cfg, ln.Addr().String())
	})

	Describe("Channels", func() {
		listing := func(status int, body string) *httptest.Server {
			s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				defer GinkgoRecover()
				Expect(r.URL.Path).To(Equal("/channels"))
				Expect(r.URL.Query()["topic"]).To(Equal([]string{"t#ephemeral"}))
				w.WriteHeader(status)
				_, _ = io.WriteString(w, body)
			}))
			DeferCleanup(s.Close)
			return s
		}

		It("queries all daemons and joins their answers", func() {
			other := listing(200, `{"channels":["another's"]}`)
			elsewhere := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				http.Redirect(w, r, other.URL+r.URL.String(), http.StatusFound)
			}))
			DeferCleanup(elsewhere.Close)
			webs := []*httptest.Server{
				listing(200, `{"channels":["b","e#ephemeral"]}`),
				listing(200, `{"channels":["a","b"]}`),
				listing(404, `{"message":"TOPIC_NOT_FOUND"}`),
				listing(500, `oh`),
				listing(200, `nonsense`),
				listing(200, `{"channels":["`+strings.Repeat("x", 5<<20)+`"]}`),
				listing(200, `{"channels":["many"`+strings.Repeat(`,""`, 1<<20)+`]}`),
				elsewhere,
				nil,
			}
			var addresses []string
			for _, web := range webs {
				d := startDaemon("127.0.0.1:0")
				d.web = web
				addresses = append(addresses, d.address())
			}
			a := run(config(c), addresses...)
			Eventually(func() bool {
				s := a.State()
				return len(s) == len(webs) && !slices.ContainsFunc(s, func(s lookupd.State) bool { return !s.Connected })
			}).Should(BeTrue())
			Expect(a.Channels(context.Background(), "t#ephemeral")).To(Equal([]string{"a", "b"}))
		})

		It("has none without a daemon", func() {
			Expect(run(config(c)).Channels(context.Background(), "t")).To(BeEmpty())
		})
	})

	It("names all that is wrong with its configuration", func() {
		_, err := lookupd.New(lookupd.Config{PingInterval: -time.Second}, []string{"nowhere"})
		for _, want := range []string{"connect timeout", "request timeout", "ping interval -1s", "pause", "list of topics", `"nowhere"`} {
			Expect(err).To(MatchError(ContainSubstring(want)))
		}
	})
})
