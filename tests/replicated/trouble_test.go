package replicated_test

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"testing"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nsqio/go-nsq"

	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
	"github.com/srtm-io/srtm/nsqd/replicated"
)

// A configuration fault, on either side, is an immediate error that names the fault, without the
// password.
func TestNATSThatIsOfNoUse(t *testing.T) {
	t.Parallel()
	authority := testkit.NewAuthority(t)
	locked := startServers(t, 1, func(o *server.Options) {
		o.Username, o.Password = "srtm", "secret"
		o.TLS, o.TLSConfig = true, &tls.Config{Certificates: []tls.Certificate{authority.Certificate("nats").TLS}}
	})
	trusting := &tls.Config{RootCAs: authority.Pool}
	for name, c := range map[string]struct {
		url  string
		tls  *tls.Config
		want string
	}{
		"password": {strings.Replace(locked.url(), "//", "//srtm:wrong@", 1), trusting, "Authorization"},
		"nobody":   {locked.url(), trusting, "Authorization"},
		"unknown":  {strings.Replace(locked.url(), "//", "//srtm:secret@", 1), &tls.Config{}, "certificate"},
		"disabled": {startServers(t, 1, func(o *server.Options) { o.JetStream = false }).url(), nil, "has no JetStream"},
		"small":    {startServers(t, 1, func(o *server.Options) { o.MaxPayload = 1 << 20 }).url(), nil, "max_payload"},
		"old":      {earlier(t), nil, "release 2.9.10: want 2.10"},
	} {
		var log bytes.Buffer
		_, err := replicated.Connect(t.Context(), replicated.Config{
			URL: c.url, TLS: c.tls, Replicas: 1, BrokerID: "b", MaxBody: 1 << 20, Log: slog.New(slog.NewTextHandler(&log, nil)),
		})
		if err == nil || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "secret") || log.Len() > 0 {
			t.Errorf("%s: %v; log: %s", name, err, log.String())
		}
	}

	// With the right configuration a broker stores and delivers.
	b := localtest.NSQD(t, "", "--durability=replicated", "--jetstream-url="+strings.Replace(locked.url(), "//", "//srtm:secret@", 1),
		"--jetstream-tls-ca="+authority.File, "--jetstream-replicas=1", "--broker-id=b")
	testkit.Must(t, localtest.Producer(t, b.TCP, "p").Publish("t", []byte("safe")))
	got := make(localtest.Bodies, 10)
	localtest.Consume(t, "t", "c", got, nil, b.TCP)
	got.Want(t, "safe")
}

// earlier is the URL of a server that claims to be an earlier release.
func earlier(t *testing.T) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	testkit.Must(t, err)
	done := make(chan struct{})
	go func() {
		defer close(done)
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		fmt.Fprintf(c, "INFO {\"server_id\":\"x\",\"version\":\"2.9.10\",\"max_payload\":8388608,\"headers\":true}\r\n")
		for lines := bufio.NewScanner(c); lines.Scan(); {
			if lines.Text() == "PING" {
				fmt.Fprintf(c, "PONG\r\n")
			}
		}
	}()
	t.Cleanup(func() {
		testkit.Must(t, l.Close())
		<-done
	})
	return "nats://" + l.Addr().String()
}

// While NATS is unavailable a starting broker waits for it, and logs the reason.
func TestNATSComesLater(t *testing.T) {
	t.Parallel()
	s := startServers(t, 1)
	s.stop(0)
	ctx, cancel := context.WithCancel(t.Context())
	logged := make(chan string, 1)
	config := replicated.Config{URL: s.url(), Replicas: 1, BrokerID: "b", MaxBody: 1 << 20, Log: slog.New(slog.NewTextHandler(writer(func(p []byte) {
		select {
		case logged <- string(p):
		default: // an earlier line waits to be read
		}
	}), nil))}
	ended := make(chan error)
	go func() {
		_, err := replicated.Connect(ctx, config)
		ended <- err
	}()
	unavailable := func() {
		if line := <-logged; !strings.Contains(line, "NATS JetStream is unavailable") {
			t.Errorf("logged %q, want the reason for the wait", line)
		}
	}
	unavailable()
	cancel()
	testkit.ErrorIs(t, <-ended, context.Canceled, "stopped while it waits")
	go func() {
		c, err := replicated.Connect(t.Context(), config)
		if err == nil {
			c.Close()
		}
		ended <- err
	}()
	unavailable()
	s.start(0)
	testkit.Must(t, <-ended)
}

type writer func([]byte)

func (w writer) Write(p []byte) (int, error) {
	w(p)
	return len(p), nil
}

// While most servers are down, publishers are refused after a bounded wait, and the broker reports
// that it is not healthy. Then everything resumes by itself, and nothing acknowledged is lost.
func TestMostServersAreAway(t *testing.T) {
	t.Parallel()
	s := startServers(t, 3)
	b := localtest.NSQD(t, "", "--durability=replicated", "--jetstream-url="+s.url(), "--broker-id=b")
	producer := localtest.Producer(t, b.TCP, "p")
	var want []string
	publish := func(body string) error {
		err := producer.Publish("t", []byte(body))
		if err == nil {
			want = append(want, body)
		}
		return err
	}
	for n := range 20 {
		testkit.Must(t, publish(fmt.Sprint("before ", n)))
	}
	s.stop(1)
	s.stop(2)
	var err error
	within(t, "a publisher is refused", func() bool { // one message may still have been stored
		err = publish("meanwhile")
		return err != nil
	})
	if text := err.Error(); !strings.Contains(text, "E_PUB_FAILED") && !strings.Contains(text, "E_QUEUE_FULL topic \"t\" cannot be stored now") {
		t.Errorf("refused with %v", err)
	}
	within(t, "the broker is not healthy", func() bool {
		healthy := testkit.Result(localtest.Metric(b, "srtm_nsqd_disk_healthy")).Must(t)
		return healthy == 0
	})
	s.start(1)
	s.start(2)
	within(t, "publishers are taken again", func() bool { return publish("after") == nil })
	within(t, "the broker is healthy", func() bool {
		_, code, err := localtest.Ask(http.MethodGet, "http://"+b.HTTP+"/ping", "")
		return err == nil && code == http.StatusOK
	})
	got := make(localtest.Bodies, 1000)
	localtest.Consume(t, "t", "c", got, nil, b.TCP)
	got.Want(t, want...)
}

// A topic with a full stream accepts nothing more, and reports the cause. A broker started then has
// all messages, and when consumers have made room the topic accepts more.
func TestAStreamIsFull(t *testing.T) {
	t.Parallel()
	s := startServers(t, 1)
	start := func() *local.Process {
		return localtest.NSQD(t, "", "--durability=replicated", "--jetstream-url="+s.url(), "--jetstream-replicas=1", "--broker-id=b",
			"--jetstream-max-bytes=4194304", "--max-msg-size=100000")
	}
	b := start()
	localtest.Ask(http.MethodPost, "http://"+b.HTTP+"/topic/create?topic=t", "")
	localtest.Ask(http.MethodPost, "http://"+b.HTTP+"/channel/create?topic=t&channel=c", "")
	producer, err := localtest.NewProducer(b.TCP, "p")
	testkit.Must(t, err)
	var want []string
	for n := 0; err == nil && n < 1000; n++ {
		body := fmt.Sprint(n) + strings.Repeat("x", 40_000)
		if err = producer.Publish("t", []byte(body)); err == nil {
			want = append(want, body)
		}
	}
	if err == nil || !strings.Contains(err.Error(), "E_QUEUE_FULL") || len(want) < 50 {
		t.Errorf("after %d messages: %v", len(want), err)
	}
	if refused, err := localtest.Metric(b, "srtm_nsqd_topic_messages_refused_total"); err != nil || refused < 1 {
		t.Errorf("%v are counted: %v", refused, err)
	}
	testkit.Must(t, b.Kill())
	producer.Stop()

	b = start()
	producer = localtest.Producer(t, b.TCP, "p")
	testkit.ErrorHas(t, producer.Publish("t", []byte("more")), "E_QUEUE_FULL", "after a restart")
	got := make(localtest.Bodies, 1000)
	localtest.Consume(t, "t", "c", got, func(c *nsq.Config) { c.MaxInFlight = 20 }, b.TCP)
	got.Want(t, want...)
	within(t, "there is room", func() bool { return producer.Publish("t", []byte("room")) == nil })
	got.Want(t, "room")
}
