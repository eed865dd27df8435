package client_test

import (
	"bufio"
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"os"
	"runtime"
	"runtime/debug"
	"strings"
	"testing"
	"time"

	"github.com/golang/snappy"
	"github.com/klauspost/compress/flate"

	"github.com/srtm-io/srtm/client"
	"github.com/srtm-io/srtm/client/fake"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/nsq/wire"
)

// peer is a broker that sends any bytes the test wants.
type peer struct {
	net.Conn
	r io.Reader
	w io.Writer
}

// hello reads the magic and IDENTIFY.
func (p *peer) hello() (identify string) {
	if _, err := io.ReadFull(p.r, make([]byte, len("  V2"))); err != nil {
		return ""
	}
	return p.command()
}

// line reads a line.
func (p *peer) line() string {
	var line []byte
	for one := []byte{0}; one[0] != '\n'; line = append(line, one[0]) {
		if _, err := io.ReadFull(p.r, one); err != nil {
			return ""
		}
	}
	return string(line)
}

// command reads a command with a body, and returns both.
func (p *peer) command() string {
	line := p.line()
	size := make([]byte, 4)
	if _, err := io.ReadFull(p.r, size); err != nil {
		return ""
	}
	body := make([]byte, binary.BigEndian.Uint32(size))
	_, _ = io.ReadFull(p.r, body)
	return line + string(body)
}

func (p *peer) say(text string) { _, _ = p.w.Write(wire.AppendResponse(nil, text)) }

// hostile places one publisher at a broker that handles each connection with serve, and returns a function that opens
// the publisher.
func hostile(t *testing.T, cfg client.Config, serve func(*peer)) func(context.Context) (*client.Publisher, error) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	testkit.Must(t, err)
	over := make(chan struct{})
	go func() {
		defer close(over)
		for {
			nc, err := ln.Accept()
			if err != nil {
				return
			}
			serve(&peer{nc, nc, nc})
			nc.Close()
		}
	}()
	placement := testkit.Result(fake.NewPlacement()).Must(t)
	placement.Place(topic, ln.Addr().String(), "p")
	cfg.Address = placement.Address()
	c := testkit.Result(client.New(cfg)).Must(t)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), testkit.Hang)
		defer cancel()
		testkit.Must(t, c.Close(ctx))
		placement.Close()
		ln.Close()
		<-over
	})
	return func(ctx context.Context) (*client.Publisher, error) { return c.Publisher(ctx, topic, "p") }
}

// A bad answer to IDENTIFY ends the attempt, not the process.
func TestAnswersToIdentify(t *testing.T) {
	frame := func(size uint32, rest string) string {
		return string(binary.BigEndian.AppendUint32(nil, size)) + rest
	}
	for name, answer := range map[string]string{
		"nothing in a frame":     frame(4, "\x00\x00\x00\x00"),
		"less than a frame":      frame(2, "\x00\x00\x00\x00"),
		"a frame of 2 GB":        frame(1<<31-1, "\x00\x00\x00\x00{"),
		"another protocol":       "HTTP/1.1 400 Bad Request\r\n\r\n",
		"no JSON":                frame(5, "\x00\x00\x00\x00{"),
		"an error":               frame(9, "\x00\x00\x00\x01E_BAD"),
		"a message":              frame(9, "\x00\x00\x00\x02E_BAD"),
		"TLS that was not meant": frame(20, "\x00\x00\x00\x00"+`{"tls_v1":false}`),
	} {
		t.Run(name, func(t *testing.T) {
			cfg := client.Config{NSQ: client.DefaultNSQConfig()}
			cfg.NSQ.TlsV1, cfg.NSQ.AuthSecret = true, "secret"
			ctx, cancel := context.WithTimeout(context.Background(), testkit.Hang)
			defer cancel()
			attempts := 0
			open := hostile(t, cfg, func(p *peer) {
				p.hello()
				_, _ = io.WriteString(p, answer)
				if attempts++; attempts == 3 {
					cancel()
				}
				if more, _ := io.ReadAll(p); len(more) > 0 && more[0] != 22 { // 22 is TLS
					t.Errorf("the client sends %q", more)
				}
			})
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			p, err := open(ctx)
			if err == nil {
				t.Errorf("it is connected to %s", p.Broker())
			}
			runtime.ReadMemStats(&after)
			if n := after.TotalAlloc - before.TotalAlloc; n > 64<<20 {
				t.Errorf("%d MiB allocated", n>>20)
			}
		})
	}
}

// A dial ends with its publisher, however slow the broker is.
func TestCloseDoesNotWaitForABroker(t *testing.T) {
	cfg := client.Config{NSQ: client.DefaultNSQConfig()}
	cfg.NSQ.ReadTimeout = 5 * time.Minute
	ctx, cancel := context.WithCancel(context.Background())
	open := hostile(t, cfg, func(p *peer) {
		p.hello()
		_, _ = p.Write([]byte{0, 0, 0, 20, 0}) // and no more bytes
		cancel()
		_, _ = io.ReadAll(p)
	})
	_, err := open(ctx)
	testkit.ErrorIs(t, err, context.Canceled)
}

// If a broker sends messages to a publisher, the client closes the connection.
func TestMessageToAPublisher(t *testing.T) {
	ended := make(chan error, 1)
	first := true
	open := hostile(t, client.Config{}, func(p *peer) {
		p.hello()
		p.say("OK")
		if !first {
			_, _ = io.ReadAll(p)
			return
		}
		first = false
		p.command()
		_, _ = p.Write(wire.AppendMessage(nil, 1, 1, wire.MessageID{}, []byte("x")))
		_ = p.SetReadDeadline(time.Now().Add(testkit.Hang))
		_, err := p.Read(make([]byte, 1))
		ended <- err
	})
	ctx, cancel := context.WithTimeout(context.Background(), testkit.Hang)
	defer cancel()
	p, err := open(ctx)
	testkit.Must(t, err)
	testkit.ErrorIs(t, p.Publish(ctx, []byte("1")), client.ErrUnanswered)
	if err := <-ended; errors.Is(err, os.ErrDeadlineExceeded) {
		t.Error(err)
	}
}

// The publisher closes its descriptors. It does not leave them to the garbage collector.
func TestDescriptors(t *testing.T) {
	open := func() int {
		all, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Skip("this system does not say which files are open")
		}
		return len(all)
	}
	defer debug.SetGCPercent(debug.SetGCPercent(-1))
	publisher := hostile(t, client.Config{}, func(p *peer) {
		p.hello()
		p.say("OK")
		_, _ = io.ReadAll(p)
	})
	ctx, cancel := context.WithTimeout(context.Background(), testkit.Hang)
	defer cancel()
	before := 0
	for i := range 50 {
		p := testkit.Result(publisher(ctx)).Must(t)
		testkit.Must(t, p.Close(ctx))
		if i == 0 {
			before = open()
		}
	}
	if after := open(); after > before+5 {
		t.Errorf("%d files are open, after %d", after, before)
	}
}

// The test negotiates every feature, alone and together.
func TestNegotiation(t *testing.T) {
	authority := testkit.NewAuthority(t)
	certificate := authority.Certificate("broker").TLS
	for _, granted := range []string{"", "deflate", "snappy", "tls_v1", "tls_v1 deflate", "tls_v1 snappy", "auth_required"} {
		t.Run(granted, func(t *testing.T) {
			cfg := client.Config{NSQ: client.DefaultNSQConfig()}
			cfg.NSQ.TlsV1, cfg.NSQ.TlsConfig = strings.Contains(granted, "tls"), &tls.Config{RootCAs: authority.Pool}
			cfg.NSQ.Deflate, cfg.NSQ.Snappy, cfg.NSQ.AuthSecret = strings.Contains(granted, "deflate"), strings.Contains(granted, "snappy"), "s3cret"
			got := make(chan string, 3)
			open := hostile(t, cfg, func(p *peer) {
				got <- p.hello()
				answer := `{"max_rdy_count":1`
				for _, name := range strings.Fields(granted) {
					answer += `,"` + name + `":true`
				}
				p.say(answer + "}")
				for _, name := range strings.Fields(granted) {
					var under io.ReadWriter = p.Conn
					switch name {
					case "tls_v1":
						secured := tls.Server(p.Conn, &tls.Config{Certificates: []tls.Certificate{certificate}})
						p.Conn, p.r, p.w = secured, secured, secured
					case "deflate":
						w, _ := flate.NewWriter(under, 6)
						p.r, p.w = flate.NewReader(bufio.NewReader(under)), flusher{w}
					case "snappy":
						p.r, p.w = snappy.NewReader(under), flusher{snappy.NewBufferedWriter(under)}
					case "auth_required":
						got <- p.command()
					}
					p.say("OK")
				}
				got <- p.command()
				p.say("OK")
				_, _ = io.Copy(io.Discard, p.r)
			})
			ctx, cancel := context.WithTimeout(context.Background(), testkit.Hang)
			defer cancel()
			p := testkit.Result(open(ctx)).Must(t)
			testkit.Must(t, p.Publish(ctx, []byte("body")))
			hello := <-got
			for _, want := range []string{"IDENTIFY\n{", `"client_id":"p"`, `"feature_negotiation":true`, `"heartbeat_interval":5000`} {
				if !strings.Contains(hello, want) {
					t.Errorf("%q has no %q", hello, want)
				}
			}
			if granted == "auth_required" {
				testkit.Equal(t, <-got, "AUTH\ns3cret")
			}
			testkit.Equal(t, <-got, "PUB t\nbody")
		})
	}
}

// flusher flushes after every write.
type flusher struct {
	w interface {
		io.Writer
		Flush() error
	}
}

func (f flusher) Write(p []byte) (int, error) {
	n, err := f.w.Write(p)
	return n, errors.Join(err, f.w.Flush())
}

// A heartbeat is no answer to AUTH. The publisher would take the later answer to AUTH for the answer to the first
// publish.
func TestHeartbeatDuringAuth(t *testing.T) {
	cfg := client.Config{NSQ: client.DefaultNSQConfig()}
	cfg.NSQ.AuthSecret = "s3cret"
	got := make(chan string, 2)
	open := hostile(t, cfg, func(p *peer) {
		p.hello()
		p.say(`{"auth_required":true}`)
		p.command()
		p.say(wire.Heartbeat) // NSQ's nsqd sends heartbeats while its auth server is slow
		got <- p.line()
		p.say(`{"identity":"me"}`)
		got <- p.command()
		p.say("OK")
		_, _ = io.Copy(io.Discard, p)
	})
	ctx, cancel := context.WithTimeout(context.Background(), testkit.Hang)
	defer cancel()
	p := testkit.Result(open(ctx)).Must(t)
	testkit.NoError(t, p.Publish(ctx, []byte("1")))
	testkit.Equal(t, <-got, "NOP\n")
	testkit.Equal(t, <-got, "PUB t\n1")
}

// An answer other than OK accepts no message.
func TestAnotherAnswer(t *testing.T) {
	for _, text := range []string{"", "CLOSE_WAIT", `{"a":1}`} {
		open := hostile(t, client.Config{}, func(p *peer) {
			p.hello()
			p.say("OK")
			p.command()
			p.say(text)
			_, _ = io.Copy(io.Discard, p)
		})
		ctx, cancel := context.WithTimeout(context.Background(), testkit.Hang)
		defer cancel()
		p := testkit.Result(open(ctx)).Must(t)
		testkit.ErrorIs(t, p.Publish(ctx, []byte("1")), client.ErrUnanswered, "%q", text)
	}
}

// If a broker reads nothing, a waiting write does not delay the end of its publisher.
func TestCloseDoesNotWaitForAWrite(t *testing.T) {
	cfg := client.Config{NSQ: client.DefaultNSQConfig()}
	cfg.NSQ.WriteTimeout = 5 * time.Minute
	begun, over := make(chan struct{}), make(chan struct{})
	open := hostile(t, cfg, func(p *peer) {
		p.hello()
		p.say("OK")
		p.line()
		close(begun)
		<-over
	})
	defer close(over)
	ctx, cancel := context.WithTimeout(context.Background(), testkit.Hang)
	defer cancel()
	p := testkit.Result(open(ctx)).Must(t)
	failed := make(chan error, 3)
	for range cap(failed) {
		go func() { failed <- p.Publish(ctx, make([]byte, 32<<20)) }()
	}
	<-begun
	short, end := context.WithTimeout(ctx, 100*time.Millisecond)
	defer end()
	testkit.ErrorIs(t, p.Close(short), context.DeadlineExceeded)
	for range cap(failed) {
		err := <-failed
		if !errors.Is(err, client.ErrClosed) && !errors.Is(err, client.ErrUnanswered) {
			t.Error(err)
		}
	}
}
