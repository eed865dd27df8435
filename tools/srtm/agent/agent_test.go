package agent

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nsqio/go-nsq"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/srtm-io/srtm/client/fake"
	"github.com/srtm-io/srtm/client/pool"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/nsq/frames"
	"github.com/srtm-io/srtm/nsq/wire"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func TestAgent(t *testing.T) {
	RegisterFailHandler(Fail)
	SetDefaultEventuallyTimeout(testkit.Hang)
	RunSpecs(t, "agent")
}

const topic = "t"

// raw is a producer that writes raw bytes.
type raw struct {
	net.Conn
	r *bufio.Reader
}

// frame returns the next frame, or the reason of the connection's end. Heartbeats are returned like all other frames.
func (r raw) frame() string {
	_, data, err := frames.Read(r.r, 1<<20)
	switch {
	case err == io.EOF:
		return "end"
	case err != nil:
		return err.Error()
	}
	return string(data)
}

func (r raw) write(text string) {
	GinkgoHelper()
	_, err := io.WriteString(r, text)
	Expect(err).NotTo(HaveOccurred())
}

func sized(body string) string {
	return string(binary.BigEndian.AppendUint32(nil, uint32(len(body)))) + body
}

func pub(topic, body string) string { return "PUB " + topic + "\n" + sized(body) }

func identify(json string) string { return "  V2IDENTIFY\n" + sized(json) }

var _ = Describe("an agent", func() {
	var (
		log       *fake.Log
		a, b      *fake.Broker
		placement *fake.Placement
		cfg       Config
		metrics   *prometheus.Registry
		agent     *Agent
		address   string
		stop      func() error // once
	)
	broker := func(name string) *fake.Broker {
		GinkgoHelper()
		b, err := fake.NewBrokerAt(name, log, testkit.Address(GinkgoTB())) // the port stays reserved while the broker is down
		Expect(err).NotTo(HaveOccurred())
		DeferCleanup(b.Close)
		return b
	}
	BeforeEach(func() {
		log = &fake.Log{}
		a, b = broker("a"), broker("b")
		var err error
		placement, err = fake.NewPlacement()
		Expect(err).NotTo(HaveOccurred())
		DeferCleanup(func() { placement.Close() })
		placement.Place(topic, a.Address(), "p", "q")
		metrics = prometheus.NewRegistry()
		cfg = DefaultConfig()
		cfg.Loaddistributor, cfg.Metrics, cfg.DrainTimeout = placement.Address(), metrics, testkit.Hang
	})
	JustBeforeEach(func() {
		var err error
		agent, err = New(cfg)
		Expect(err).NotTo(HaveOccurred())
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		Expect(err).NotTo(HaveOccurred())
		address = ln.Addr().String()
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan error, 1)
		running := agent
		go func() { done <- running.Run(ctx, ln) }()
		stop = sync.OnceValue(func() error { cancel(); return <-done })
		DeferCleanup(func() {
			a.Hold(false) // some specs leave publishes without an answer
			b.Hold(false)
			_ = stop() // the specs that stop the agent check the error themselves
		})
	})
	producer := func(id string) *nsq.Producer {
		GinkgoHelper()
		config := nsq.NewConfig()
		config.ClientID = id
		p, err := nsq.NewProducer(address, config)
		Expect(err).NotTo(HaveOccurred())
		p.SetLoggerLevel(nsq.LogLevelMax)
		DeferCleanup(p.Stop)
		return p
	}
	dial := func() raw {
		GinkgoHelper()
		nc, err := net.Dial("tcp", address)
		Expect(err).NotTo(HaveOccurred())
		DeferCleanup(func() { nc.Close() })
		return raw{nc, bufio.NewReader(nc)}
	}
	open := func(id string) raw {
		GinkgoHelper()
		r := dial()
		r.write(identify(`{"client_id":"` + id + `"}`))
		Expect(r.frame()).To(Equal("OK"))
		return r
	}
	published := func() (bodies []string) {
		for _, e := range log.Events() {
			if e.Kind == fake.Pub {
				for _, body := range e.Bodies {
					bodies = append(bodies, e.Broker+":"+string(body))
				}
			}
		}
		return bodies
	}
	metric := func(name string, labels ...string) float64 {
		return testkit.Metric(GinkgoTB(), metrics, name, labels...)
	}

	It("publishes for a stock producer, under its client id", func() {
		p := producer("p")
		Expect(p.Publish(topic, []byte("1"))).To(Succeed())
		Expect(p.MultiPublish(topic, [][]byte{[]byte("2"), []byte("3")})).To(Succeed())
		Expect(p.DeferredPublish(topic, 1500*time.Millisecond, []byte("4"))).To(Succeed())
		Expect(published()).To(Equal([]string{"a:1", "a:2", "a:3", "a:4"}))
		Expect(a.Clients()).To(Equal([]string{"p"}))
		for _, e := range log.Events() {
			if e.Kind == fake.Pub && string(e.Bodies[0]) == "4" {
				Expect(e.Delay).To(Equal(1500 * time.Millisecond))
			}
		}
		Expect(metric("srtm_publish_agent_publishes_total", "accepted")).To(Equal(3.0))
		Expect(metric("srtm_publish_agent_connections")).To(Equal(1.0))
		Expect(metric("srtm_publish_agent_publishers")).To(Equal(1.0))
	})

	It("shares a publisher among connections, and keeps each one's order", func() {
		first, second := producer("p"), producer("p")
		done := make(chan *nsq.ProducerTransaction, 1000)
		for i := range 500 {
			for name, p := range map[string]*nsq.Producer{"x": first, "y": second} {
				Expect(p.PublishAsync(topic, []byte(name+strconv.Itoa(i)), done)).To(Succeed())
			}
		}
		for range 1000 {
			Expect((<-done).Error).NotTo(HaveOccurred())
		}
		next := map[string]int{}
		for _, body := range published() {
			name := body[2:3]
			Expect(body).To(Equal("a:" + name + strconv.Itoa(next[name])))
			next[name]++
		}
		Expect(next).To(Equal(map[string]int{"x": 500, "y": 500}))
		Expect(a.Clients()).To(Equal([]string{"p"}))
	})

	It("sends OK after the broker's OK", func() {
		r := open("p")
		a.Hold(true)
		r.write(pub(topic, "1") + pub(topic, "2"))
		Eventually(a.Held).Should(Equal(2))
		answers := make(chan string, 2)
		go func() { answers <- r.frame(); answers <- r.frame() }()
		Consistently(answers).WithTimeout(50 * time.Millisecond).ShouldNot(Receive())
		a.Hold(false)
		Eventually(answers).Should(Receive(Equal("OK")))
		Eventually(answers).Should(Receive(Equal("OK")))
	})

	It("takes bytes in any pieces", func() {
		r := dial()
		for _, c := range []byte(identify(`{"client_id":"p"}`) + pub(topic, "1") + "NOP\n" + "MPUB " + topic + "\n" + sized("\x00\x00\x00\x01"+sized("2"))) {
			r.write(string(c))
		}
		for range 3 {
			Expect(r.frame()).To(Equal("OK"))
		}
		Expect(published()).To(Equal([]string{"a:1", "a:2"}))
	})

	It("follows migrations: nothing lost, repeated or reordered", func() {
		const producers = 3
		ids := []string{"m0", "m1", "m2"}
		placement.Place(topic, a.Address(), ids...)
		halt := make(chan struct{})
		sent := make([]int, producers)
		var sending sync.WaitGroup
		for i, id := range ids {
			p := producer(id)
			sending.Go(func() {
				defer GinkgoRecover()
				for {
					select {
					case <-halt:
						return
					default:
					}
					Expect(p.Publish(topic, []byte(fmt.Sprintf("%s/%d", id, sent[i])))).To(Succeed())
					sent[i]++
				}
			})
		}
		for i := range 6 {
			to := []*fake.Broker{b, a}[i%2]
			was := len(published())
			placement.Place(topic, to.Address(), ids...)
			Eventually(to.Clients).Should(ContainElements(ids))
			Eventually(func() int { return len(published()) }).Should(BeNumerically(">", was+30))
		}
		close(halt)
		sending.Wait()
		next := map[string]int{}
		for _, body := range published() {
			id, n, _ := strings.Cut(body[2:], "/")
			Expect(n).To(Equal(strconv.Itoa(next[id])))
			next[id]++
		}
		for i, id := range ids {
			Expect(next[id]).To(Equal(sent[i]))
		}
	})

	It("passes a refusal on, and continues", func() {
		a.Refuse(func(_ string, body []byte) *wire.Error {
			if string(body) == "no" {
				return wire.RateLimited(20 * time.Millisecond)
			}
			return nil
		})
		r := open("p")
		r.write(pub(topic, "no") + pub(topic, "yes"))
		Expect(r.frame()).To(Equal("E_RATE_LIMITED retry_after_ms=20"))
		Expect(r.frame()).To(Equal("OK"))
		Expect(metric("srtm_publish_agent_publishes_total", "refused")).To(Equal(1.0))
	})

	DescribeTable("refuses what cannot be published, and closes", func(id, commands, answer string) {
		r := open(id)
		r.write(commands)
		Expect(r.frame()).To(HavePrefix(answer))
		Expect(r.frame()).To(Equal("end"))
		Expect(published()).To(BeEmpty())
	},
		Entry("a topic that is unknown", "p", pub("nothing", "1"), "E_PUB_FAILED not accepted: topic or publisher is unknown"),
		Entry("a publisher that is unknown", "nobody", pub(topic, "1"), "E_PUB_FAILED not accepted: topic or publisher is unknown"),
		Entry("a producer without a name", "", pub(topic, "1"), "E_PUB_FAILED not accepted: not sent: no client_id"),
		Entry("a topic that is no name", "p", pub("no!topic", "1"), "E_BAD_TOPIC"),
		Entry("an empty message", "p", pub(topic, ""), "E_BAD_MESSAGE"),
		Entry("a subscription", "p", "SUB "+topic+" c\n", "E_INVALID SUB to an agent"),
		Entry("an unknown verb", "p", "SHOUT\n", "E_INVALID"),
	)

	It("answers what came before a refusal", func() {
		r := open("p")
		a.Hold(true)
		r.write(pub(topic, "1") + "SHOUT\n" + pub(topic, "2"))
		Eventually(a.Held).Should(Equal(1))
		a.Hold(false)
		Expect(r.frame()).To(Equal("OK"))
		Expect(r.frame()).To(HavePrefix("E_INVALID"))
		Expect(r.frame()).To(Equal("end"))
		Expect(published()).To(Equal([]string{"a:1"}))
	})

	It("answers that what broke may have been accepted, and recovers", func() {
		r := open("p")
		a.Hold(true)
		r.write(pub(topic, "1"))
		Eventually(a.Held).Should(Equal(1))
		a.Abort()
		Expect(r.frame()).To(Equal("E_PUB_FAILED sent but not answered: it may have been accepted"))
		Expect(r.frame()).To(Equal("end"))
		a.Hold(false)
		Expect(producer("p").Publish(topic, []byte("2"))).To(Succeed())
		Expect(metric("srtm_publish_agent_publishes_total", "unanswered")).To(Equal(1.0))
	})

	It("waits for a broker that comes back", func() {
		p := producer("p")
		Expect(p.Publish(topic, []byte("1"))).To(Succeed())
		address := a.Address()
		a.Close()
		done := make(chan error, 1)
		go func() { done <- p.Publish(topic, []byte("2")) }()
		Consistently(done).WithTimeout(50 * time.Millisecond).ShouldNot(Receive())
		again, err := fake.NewBrokerAt("again", log, address)
		Expect(err).NotTo(HaveOccurred())
		DeferCleanup(again.Close)
		Eventually(done).Should(Receive(BeNil()))
		Expect(published()).To(Equal([]string{"a:1", "again:2"}))
	})

	Context("with little patience", func() {
		BeforeEach(func() { cfg.PublishTimeout = 100 * time.Millisecond })

		It("refuses in time when there is no broker, and tries again later", func() {
			a.Close()
			r := open("p")
			r.write(pub(topic, "1"))
			Expect(r.frame()).To(Equal("E_PUB_FAILED not accepted in time"))
			placement.Place(topic, b.Address(), "p")
			Eventually(func() error { return producer("p").Publish(topic, []byte("2")) }).Should(Succeed())
			// On a busy machine a publish may not be answered in time.
			Expect(published()).To(HaveEach("b:2"))
			Expect(metric("srtm_publish_agent_publishes_total", "unsent")).To(BeNumerically(">=", 1))
		})
	})

	Context("with one publisher for all", func() {
		BeforeEach(func() { cfg.PublisherID = "q" })

		It("does not require a name of producers", func() {
			r := dial()
			r.write("  V2" + pub(topic, "1"))
			Expect(r.frame()).To(Equal("OK"))
			Expect(producer("anything").Publish(topic, []byte("2"))).To(Succeed())
			Expect(a.Clients()).To(Equal([]string{"q"}))
		})
	})

	Context("with bounds", func() {
		BeforeEach(func() { cfg.MaxConnections, cfg.MaxPublishers, cfg.MaxOutstanding = 2, 1, 3 })

		It("takes no more producers", func() {
			first := open("p")
			open("p")
			Expect(dial().frame()).To(Equal("end"))
			Expect(metric("srtm_publish_agent_connections_refused_total")).To(Equal(1.0))
			first.Close()
			Eventually(func() string {
				r := dial()
				_, _ = io.WriteString(r, identify(`{}`)) // refused until the agent notices the end of the first connection
				return r.frame()
			}).Should(Equal("OK"))
		})

		It("opens no more publishers", func() {
			Expect(producer("p").Publish(topic, []byte("1"))).To(Succeed())
			r := open("q")
			r.write(pub(topic, "2"))
			Expect(r.frame()).To(Equal("E_PUB_FAILED not accepted: not sent: too many publishers"))
		})

		It("sends no more, and answers everything in the end", func() {
			r := open("p")
			a.Hold(true)
			go func() {
				for i := range 50 {
					_, _ = io.WriteString(r, pub(topic, strconv.Itoa(i))) // the answers show errors
				}
			}()
			Eventually(a.Held).Should(Equal(3))
			Consistently(a.Held).WithTimeout(50 * time.Millisecond).Should(Equal(3))
			a.Hold(false)
			for range 50 {
				Expect(r.frame()).To(Equal("OK"))
			}
			Expect(published()).To(HaveLen(50))
		})

		It("does not take a producer for silent whose words it leaves unread", func() {
			r := dial()
			r.write(identify(`{"client_id":"p","heartbeat_interval":1000}`))
			Expect(r.frame()).To(Equal("OK"))
			a.Hold(true)
			go func() {
				for i := range 50 {
					_, _ = io.WriteString(r, pub(topic, strconv.Itoa(i))) // the answers show errors
				}
			}()
			Eventually(a.Held).Should(Equal(3))
			for range 3 {
				Expect(r.frame()).To(Equal("_heartbeat_"))
			}
			a.Hold(false)
			oks := 0
			for oks < 50 {
				if f := r.frame(); f == "OK" {
					oks++
				} else {
					Expect(f).To(Equal("_heartbeat_"))
				}
			}
		})
	})

	Context("with little room", func() {
		BeforeEach(func() { cfg.MaxBuffer = 5 << 20 })

		It("has producers wait for each other", func() {
			a.Hold(true)
			body := strings.Repeat("x", 1<<20-pool.Overhead)
			var all []raw
			for range 8 {
				r := open("p")
				go func() { _, _ = io.WriteString(r, pub(topic, body)) }() // the answers show errors
				all = append(all, r)
			}
			Eventually(a.Held).Should(Equal(5))
			Consistently(a.Held).WithTimeout(50 * time.Millisecond).Should(Equal(5))
			open("p") // takes no room
			a.Hold(false)
			for _, r := range all {
				Expect(r.frame()).To(Equal("OK"))
			}
		})
	})

	Context("with publishers soon forgotten", func() {
		BeforeEach(func() { cfg.IdleTimeout = 20 * time.Millisecond })

		It("closes those that are not used, and opens them again", func() {
			p := producer("p")
			for i := range 3 {
				Expect(p.Publish(topic, []byte(strconv.Itoa(i)))).To(Succeed())
				p.Stop()
				Eventually(a.Clients).Should(BeEmpty())
				Expect(metric("srtm_publish_agent_publishers")).To(BeZero())
				p = producer("p")
			}
			Expect(published()).To(Equal([]string{"a:0", "a:1", "a:2"}))
		})
	})

	Describe("stopping", func() {
		It("answers what it has read, and closes in order", func() {
			r := open("p")
			a.Hold(true)
			r.write(pub(topic, "1") + pub(topic, "2"))
			Eventually(a.Held).Should(Equal(2))
			stopped := make(chan error, 1)
			go func() { stopped <- stop() }()
			Eventually(func() error {
				nc, err := net.Dial("tcp", address)
				if err == nil {
					nc.Close()
				}
				return err
			}).Should(HaveOccurred())
			Consistently(stopped).WithTimeout(50 * time.Millisecond).ShouldNot(Receive())
			a.Hold(false)
			Expect(r.frame()).To(Equal("OK"))
			Expect(r.frame()).To(Equal("OK"))
			Expect(r.frame()).To(Equal("end"))
			r.Close()
			Eventually(stopped).Should(Receive(BeNil()))
		})

		Context("in a hurry", func() {
			BeforeEach(func() { cfg.DrainTimeout = 50 * time.Millisecond })

			It("refuses what has no answer", func() {
				r := open("p")
				a.Hold(true)
				r.write(pub(topic, "1"))
				Eventually(a.Held).Should(Equal(1))
				go func() { _ = stop() }()
				Expect(r.frame()).To(HavePrefix("E_PUB_FAILED sent but not answered"))
				Expect(r.frame()).To(Equal("end"))
			})
		})
	})

	It("shows its publishers", func() {
		Expect(producer("p").Publish(topic, []byte("1"))).To(Succeed())
		Expect(producer("q").Publish(topic, []byte("2"))).To(Succeed())
		shown, err := json.Marshal(agent.State())
		Expect(err).NotTo(HaveOccurred())
		Expect(shown).To(MatchJSON(fmt.Sprintf(`{"connections": 2, "publishers": [
			{"topic": "t", "publisher": "p", "broker": %[1]q, "connections": 1},
			{"topic": "t", "publisher": "q", "broker": %[1]q, "connections": 1}]}`, a.Address())))
	})
})

var _ = Describe("New", func() {
	It("refuses a configuration with faults, all at once", func() {
		cfg := DefaultConfig()
		cfg.Loaddistributor, cfg.PublishTimeout, cfg.MaxConnections, cfg.MaxBuffer = "x:1", -1, -1, 1
		_, err := New(cfg)
		for _, part := range []string{"--publish-timeout -1ns", "--max-connections -1", "--max-buffer: 1 bytes"} {
			Expect(err).To(MatchError(ContainSubstring(part)))
		}
		_, err = New(DefaultConfig())
		Expect(err).To(MatchError(ContainSubstring("no address")))
	})

	It("ends with its listener", func() {
		cfg := DefaultConfig()
		cfg.Loaddistributor = "127.0.0.1:1"
		a, err := New(cfg)
		Expect(err).NotTo(HaveOccurred())
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		Expect(err).NotTo(HaveOccurred())
		Expect(ln.Close()).To(Succeed())
		ended := make(chan error, 1)
		go func() { ended <- a.Run(context.Background(), ln) }()
		Eventually(ended).Should(Receive(MatchError(ContainSubstring("serve producers on"))))
	})

	It("reports all faults of the command line at once", func() {
		cmd := Command()
		cmd.SilenceErrors, cmd.SilenceUsage = true, true
		cmd.SetArgs([]string{"--resend=often", "--max-outstanding=0", "--publish-timeout=0", "--producer-opt=nothing,1", "--log-level=loud"})
		err := cmd.ExecuteContext(context.Background())
		for _, part := range []string{`--resend "often"`, "--max-outstanding 0", "--publish-timeout 0s", "--producer-opt", "loud"} {
			Expect(err).To(MatchError(ContainSubstring(part)))
		}
	})
})
