package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/spf13/cobra"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/program"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/tools/srtm/screen"
)

// running is a command that runs until an interrupt.
type running struct {
	t         *testing.T
	interrupt context.CancelFunc
	ended     chan error
	out       *bufio.Reader
}

// begin starts a command with the input in.
func begin(t *testing.T, in io.Reader, args ...string) *running {
	t.Helper()
	ctx, interrupt := context.WithCancel(t.Context())
	r, w := io.Pipe()
	c := &running{t, interrupt, make(chan error, 1), bufio.NewReader(r)}
	go func() {
		err := run(ctx, args, in, w, w)
		w.Close()
		c.ended <- err
	}()
	t.Cleanup(interrupt)
	return c
}

func (c *running) lines(n int) (all []string) {
	c.t.Helper()
	for range n {
		line, err := c.out.ReadString('\n')
		if err != nil {
			c.t.Fatalf("%q, then %v and %v", all, err, <-c.ended)
		}
		all = append(all, strings.TrimSuffix(line, "\n"))
	}
	return all
}

// rest returns the remaining output of the command, and its error.
func (c *running) rest() (string, error) {
	text, _ := io.ReadAll(c.out)
	return string(text), <-c.ended
}

// broken is an output that fails after so many writes.
type broken struct {
	left int
	bytes.Buffer
}

func (b *broken) Write(p []byte) (int, error) {
	if b.left--; b.left < 0 {
		return 0, syscall.EPIPE
	}
	return b.Buffer.Write(p)
}

// Through a real cluster, one command prints the messages that another publishes.
func TestPubAndTail(t *testing.T) {
	c := localtest.Start(t, 2, []string{"--fitting=off"}, "--mcap=20000")
	localtest.Srtm(t, c.RPC, "topic", "create", "orders", "--rate=30000", "--burst=1000", "--group=a:2:15000", "--channel=billing")
	at := "--loaddistributor-address=" + c.RPC
	direct := "--nsqd-tcp-address=" + localtest.NSQD(t, "").TCP

	// An ephemeral channel gets only later messages, so both brokers must have the channel first.
	tail := begin(t, nil, "tail", "orders", "--output=json", at)
	for _, b := range c.Brokers {
		testkit.WaitFor(t, "tail's channel", func() bool {
			text, _, err := localtest.Ask("GET", "http://"+b.HTTP+"/stats?format=json", "")
			return err == nil && strings.Contains(text, "#ephemeral")
		})
	}
	dir := t.TempDir()
	file := filepath.Join(dir, "lines")
	testkit.Must(t, os.WriteFile(file, []byte("from\n\na file"), 0o600))
	// Each of the two publishers belongs to another broker.
	pub := begin(t, strings.NewReader("x y\nlast\nnot published\n"), "pub", "orders", file, "-", "--id=a.1", "--count=4", "--rate=100000", at)
	testkit.Result(pub.rest()).Equal(t, "published 4 messages to orders\n")
	pub = begin(t, nil, "pub", "orders", "--message=again", "--count=2", "--output=json", at)
	testkit.Result(pub.rest()).Equal(t, "{\n  \"published\": 2\n}\n")
	var got, from []string
	for _, line := range tail.lines(6) {
		var m struct {
			Broker, ID string
			Body       string
			Attempts   int
		}
		if err := json.Unmarshal([]byte(line), &m); err != nil || len(m.ID) != 16 || m.Attempts != 1 {
			t.Errorf("%s: %v", line, err)
		}
		got, from = append(got, m.Body), append(from, m.Broker)
	}
	slices.Sort(got)
	slices.Sort(from)
	if want := []string{"a file", "again", "again", "from", "last", "x y"}; !slices.Equal(got, want) || len(slices.Compact(from)) != 2 {
		t.Errorf("got %q from %q, want %q", got, from, want)
	}
	tail.interrupt()
	testkit.Result(tail.rest()).Equal(t, "", "after an interrupt")

	// The channel has six messages. The command prints and finishes one message before its reader ends.
	out := &broken{left: 1}
	testkit.NoError(t, run(t.Context(), []string{"tail", "orders", "--channel=billing", at}, nil, out, out))
	tail = begin(t, nil, "tail", "orders", "--channel=billing", "--count=5", at)
	text, err := tail.rest()
	got = append(strings.Split(strings.TrimSuffix(text, "\n"), "\n"), strings.TrimSuffix(out.String(), "\n"))
	slices.Sort(got)
	if want := []string{"a file", "again", "again", "from", "last", "x y"}; err != nil || !slices.Equal(got, want) {
		t.Errorf("got %q, %v, want %q", got, err, want)
	}

	// The broker is given by its address, and refuses a message.
	pub = begin(t, strings.NewReader("good\n"+strings.Repeat("x", 2<<20)+"\n"), "pub", "other", direct)
	if said, err := pub.rest(); err == nil || !strings.Contains(err.Error(), "E_BAD_MESSAGE") || said != "published 1 message to other\n" {
		t.Errorf("%q, %v", said, err)
	}
	tail = begin(t, nil, "tail", "other", direct, "--channel=c", "--count=1")
	testkit.Result(tail.rest()).Equal(t, "good\n")

	// An interrupt comes while there is no input.
	in, typed := io.Pipe()
	pub = begin(t, in, "pub", "orders", at)
	fmt.Fprintln(typed, "one")
	pub.interrupt()
	if said, err := pub.rest(); err != nil || !strings.HasPrefix(said, "published ") {
		t.Errorf("%q, %v", said, err)
	}
	typed.Close()

	for _, args := range [][]string{
		{"pub"}, {"pub", "t", "file", "--message=x"}, {"pub", "t", "--count=-1"}, {"tail"}, {"tail", "t", "--channel=a b"},
		{"pub", "t", direct, "--nsq-opt=nope=1"}, {"pub", "t", direct, direct},
	} {
		if _, _, err := srtm(t, "", args...); !errors.As(err, new(program.UsageError)) {
			t.Errorf("%q: %v", args, err)
		}
	}
	for _, args := range [][]string{{"pub", "none", at}, {"tail", "none", at}, {"pub", "orders", "--id=nobody", at}, {"pub", "orders", dir + "/none", at}} {
		if _, _, err := srtm(t, "", args...); err == nil {
			t.Errorf("%q succeeded", args)
		}
	}
}

// A hostile server at a broker's address ends an attempt, not the process. The server gets no secret in clear if TLS is
// requested, and delays no interrupt.
func TestHostileBrokers(t *testing.T) {
	secret := testkit.File(t, "secret", "s3cret\n")
	frame := func(text string) string { return string(wire.AppendResponse(nil, text)) }
	for name, answer := range map[string]string{
		"nothing in a frame": frame(""), "a frame of 2 GB": "\x7f\xff\xff\xff\x00\x00\x00\x00", "no TLS": frame(`{"auth_required":true}`), "silence": "",
	} {
		for _, command := range []string{"pub", "tail"} {
			t.Run(command+", "+name, func(t *testing.T) {
				ln, ended := testkit.Listen(t), make(chan struct{})
				var heard testkit.Buffer
				once := make(chan struct{}, 1) // the server has answered, and has hung up after an invalid answer
				go func() {
					defer close(ended)
					for {
						nc, err := ln.Accept()
						if err != nil {
							return
						}
						for !strings.Contains(heard.String(), "IDENTIFY") && err == nil {
							_, err = io.CopyN(&heard, nc, 1)
						}
						_, _ = io.WriteString(nc, answer)
						if answer != "" {
							_, _ = io.Copy(&heard, nc)
						}
						select {
						case once <- struct{}{}:
						default:
						}
						_, _ = io.Copy(&heard, nc)
						nc.Close()
					}
				}()
				c := begin(t, strings.NewReader("x\n"), command, "t", "--nsqd-tcp-address="+ln.Addr().String(), "--nsq-opt=tls_v1=true", "--auth-secret-file="+secret)
				<-once
				c.interrupt()
				said, err := c.rest()
				ln.Close()
				<-ended
				if err == nil && command == "pub" || strings.Contains(heard.String(), "s3cret") {
					t.Errorf("it sent %q to the broker, and %q, %v", heard.String(), said, err)
				}
			})
		}
	}
}

// The auth server decides which secrets are valid.
func TestSecretsOfAnyLength(t *testing.T) {
	for text, want := range map[string]string{"good\n": "good", "read-only 0123456789abcdef\n": "0123456789abcdef"} {
		n := nsqClient{secret: testkit.File(t, "secret", text)}
		cfg := testkit.Result(n.config()).Must(t)
		testkit.Equal(t, cfg.AuthSecret, want)
	}
	n := nsqClient{secret: testkit.File(t, "secret", "\n")}
	_, err := n.config()
	testkit.ErrorHas(t, err, "--auth-secret-file: ")
}

func TestProgress(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		var errs, out testkit.Buffer
		p := &progress{end: make(chan struct{}), done: make(chan struct{}), text: "waiting", screen: screen.New(&errs)}
		p.screen.Terminal = true
		go p.run()
		clock.Sleep(t.Context(), progressAfter-1)
		testkit.Equal(t, errs.String(), "", "too early")
		clock.Sleep(t.Context(), time.Second)
		p.printf("%d done", 7)
		clock.Sleep(t.Context(), time.Second)
		fmt.Fprintln(p.before(&errs, false), "said")
		clock.Sleep(t.Context(), time.Second)
		fmt.Fprint(p.before(&out, true), "the outcome")
		clock.Sleep(t.Context(), time.Minute)
		p.stop()
		p.stop()
		const up = "\x1b[1A\x1b[J"
		if got, want := errs.String(), "waiting (2 s)\n"+up+"7 done (3 s)\n"+up+"said\n7 done (4 s)\n"+up; got != want || out.String() != "the outcome" {
			t.Errorf("%q, want %q", got, want)
		}
	})
	var b bytes.Buffer
	cmd := &cobra.Command{}
	cmd.SetErr(&b)
	p := startProgress(cmd, "waiting")
	p.printf("more")
	p.draw(time.Minute)
	if p.stop(); b.Len() > 0 {
		t.Errorf("no terminal, and it says %q", b.String())
	}
}

// The test checks no exact times, only that there are as many turns as the rate permits.
func TestPace(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		p, begin := pace{every: every(200)}, time.Now()
		for range 101 {
			p.wait(t.Context())
		}
		testkit.Equal(t, time.Since(begin), 500*time.Millisecond, "for 100 intervals at 200/s")
		clock.Sleep(t.Context(), time.Minute)
		begin = time.Now()
		p.wait(t.Context())
		p.wait(t.Context())
		testkit.Equal(t, time.Since(begin), 5*time.Millisecond, "after a pause: it made up for it")
	})
}
