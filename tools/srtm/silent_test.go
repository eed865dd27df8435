package main

import (
	"bytes"
	"context"
	"errors"
	"net"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"

	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
	"github.com/srtm-io/srtm/nsq/wire"
)

// stub accepts connections until the test ends, calls serve for each, and closes the connections that serve left open.
func stub(t *testing.T, serve func(net.Conn)) (address string) {
	t.Helper()
	ln, ended := testkit.Listen(t), make(chan struct{})
	go func() {
		defer close(ended)
		for {
			nc, err := ln.Accept()
			if err != nil {
				return
			}
			defer nc.Close()
			serve(nc)
		}
	}()
	t.Cleanup(func() {
		ln.Close()
		<-ended
	})
	return ln.Addr().String()
}

// until reads until the peer has sent a word.
func until(nc net.Conn, word string) {
	var heard bytes.Buffer
	for one := make([]byte, 1); !strings.HasSuffix(heard.String(), word); {
		if _, err := nc.Read(one); err != nil {
			return
		}
		heard.Write(one)
	}
}

// A publish without an answer ends after --timeout, also without a terminal and with an endless input: exit code 1, the
// reason at stderr, the count at stdout. Other timeouts are longer and have other messages.
func TestPubToABrokerThatDoesNotAnswer(t *testing.T) {
	gone := testkit.Listen(t)
	gone.Close()
	const inTime = `: .*(context deadline exceeded|no answer.*--timeout)`
	for name, c := range map[string]struct {
		flag, address string
		want          string
	}{
		"broker, nothing listens": {"--nsqd-tcp-address", gone.Addr().String(), "connection refused: nothing listens there"},
		"broker, silent":          {"--nsqd-tcp-address", stub(t, func(net.Conn) {}), inTime},
		"broker, hangs up":        {"--nsqd-tcp-address", stub(t, func(nc net.Conn) { nc.Close() }), "EOF|reset by peer|broken pipe"},
		"broker, greets and is silent": {"--nsqd-tcp-address", stub(t, func(nc net.Conn) {
			until(nc, "IDENTIFY")
			_, _ = nc.Write(wire.AppendResponse(nil, wire.OK))
		}), `no answer from broker \S+ for 1s \(see --timeout\)`},
		"loaddistributor, nothing listens": {"--loaddistributor-address", gone.Addr().String(), "nothing listens there"},
		"loaddistributor, silent":          {"--loaddistributor-address", stub(t, func(net.Conn) {}), `no answer`},
	} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), local.Patience)
			defer cancel()
			cmd := exec.CommandContext(ctx, localtest.Program(t, "tools/srtm"), "pub", "t", c.flag, c.address, "--timeout=1s")
			in, input, err := os.Pipe() // the input has no end
			testkit.Must(t, err)
			defer in.Close()
			defer input.Close()
			testkit.Result(input.WriteString("hello\n")).Must(t)
			cmd.Stdin = in
			var stdout, stderr bytes.Buffer
			cmd.Stdout, cmd.Stderr = &stdout, &stderr
			if err := cmd.Run(); err != nil && !errors.As(err, new(*exec.ExitError)) {
				t.Fatal(err)
			}
			code := cmd.ProcessState.ExitCode()
			if code != 1 || !regexp.MustCompile(c.want).MatchString(stderr.String()) || strings.Count(stderr.String(), "\n") != 1 {
				t.Errorf("exit code %d, stdout %q, stderr %q, want %s", code, &stdout, &stderr, c.want)
			}
			if out := stdout.String(); out != "" && out != "published 0 messages to t\n" {
				t.Errorf("stdout %q", out)
			}
		})
	}
}
