package conformance

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"
)

// The faults of a request's topic and channel, alike for many routes.
type queryFault struct {
	query  string
	status int
	code   string
}

func TestHTTPPub(t *testing.T) {
	group(t)
	check(t, "OK", func(t *testing.T) {
		n := common(t)
		topic := n.topic()
		c := n.consumer(t, topic, "ch").rdy(1)
		before := time.Now()
		r := n.post(t, "/pub?topic="+topic, "bytes \x00\n\xff")
		after := time.Now()
		if r.status != http.StatusOK || r.body != "OK" {
			t.Fatalf("got %d %q", r.status, r.body)
		}
		m := c.body("bytes \x00\n\xff")
		if m.attempts != 1 || m.stamp.Before(before) || m.stamp.After(after) {
			t.Errorf("got %+v", m)
		}
	})
	check(t, "sizes 1 and max", func(t *testing.T) {
		n := common(t)
		topic := n.topic()
		for _, size := range []int{1, maxMessage} {
			if r := n.post(t, "/pub?topic="+topic, strings.Repeat("x", size)); r.status != http.StatusOK {
				t.Errorf("%d bytes: %d %s", size, r.status, r.body)
			}
		}
		if s := mustLookup(t, n, topic); s.MessageCount != 2 || s.MessageBytes != maxMessage+1 {
			t.Errorf("got %+v", s)
		}
	})
	check(t, "chunked", func(t *testing.T) {
		n := common(t)
		topic := n.topic()
		nc, err := net.DialTimeout("tcp", n.http, patience)
		if err != nil {
			t.Fatal(err)
		}
		defer nc.Close()
		fmt.Fprintf(nc, "POST /pub?topic=%s HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n3\r\nabc\r\n3\r\ndef\r\n0\r\n\r\n", topic)
		n.consumer(t, topic, "ch").rdy(1).body("abcdef")
	})
	check(t, "creates the topic", func(t *testing.T) {
		n := common(t)
		topic := n.topic()
		n.post(t, "/pub?topic="+topic, "x")
		if s := mustLookup(t, n, topic); len(s.Channels) != 0 || s.Depth != 1 {
			t.Errorf("got %+v", s)
		}
	})
	check(t, "defer", func(t *testing.T) {
		const delay = 400 * time.Millisecond
		n := common(t)
		topic := n.topic()
		c := n.consumer(t, topic, "ch").rdy(2)
		start := time.Now()
		n.post(t, fmt.Sprintf("/pub?topic=%s&defer=%d", topic, delay.Milliseconds()), "later")
		n.post(t, "/pub?topic="+topic, "now")
		c.notBefore(start, delay, "later", "now")
	})
	check(t, "defer at its limits", func(t *testing.T) {
		n := common(t)
		topic := n.topic()
		for _, ms := range []int64{0, maxDelay.Milliseconds()} {
			if r := n.post(t, fmt.Sprintf("/pub?topic=%s&defer=%d", topic, ms), "x"); r.status != http.StatusOK {
				t.Errorf("defer %d: %d %s", ms, r.status, r.body)
			}
		}
	})
	for _, f := range []queryFault{
		{"", 400, "MISSING_ARG_TOPIC"},
		{"?topic=t&defer=x", 400, "INVALID_DEFER"},
		{"?topic=t&defer=", 400, "INVALID_DEFER"},
		{"?topic=t&defer=-1", 400, "INVALID_DEFER"},
		{"?topic=t&defer=3600001", 400, "INVALID_DEFER"},
		{"?topic=t&defer=99999999999999999999", 400, "INVALID_DEFER"},
	} {
		check(t, "query "+f.query, func(t *testing.T) {
			common(t).post(t, "/pub"+f.query, "x").refused(t, f.status, f.code)
		})
	}
	check(t, "empty", func(t *testing.T) {
		common(t).post(t, "/pub?topic=t", "").refused(t, 400, "MSG_EMPTY")
	})
	check(t, "too big", func(t *testing.T) {
		n := start(t, "--max-msg-size=1000")
		topic := n.topic()
		n.post(t, "/pub?topic="+topic, strings.Repeat("x", 1001)).refused(t, 413, "MSG_TOO_BIG")
		if s, _ := n.lookup(t, topic); s.MessageCount != 0 {
			t.Errorf("got %+v", s)
		}
	})
}

func TestHTTPMpub(t *testing.T) {
	group(t)
	binaryBody := func(bodies ...string) string { return batch(bodies...) }
	takes := func(t *testing.T, query, body string, want ...string) {
		n := common(t)
		topic := n.topic()
		c := n.consumer(t, topic, "ch").rdy(10)
		r := n.post(t, "/mpub?topic="+topic+query, body)
		if r.status != http.StatusOK || r.body != "OK" {
			t.Fatalf("got %d %q", r.status, r.body)
		}
		if got := c.bodies(len(want)); !slices.Equal(got, want) {
			t.Errorf("got %q, want %q", got, want)
		}
		c.quiet()
	}
	check(t, "lines", func(t *testing.T) { takes(t, "", "a\nb\nc", "a", "b", "c") })
	check(t, "lines, the last one ended", func(t *testing.T) { takes(t, "", "a\nb\n", "a", "b") })
	check(t, "empty lines are left out", func(t *testing.T) { takes(t, "", "\n\na\n\nb\n\n", "a", "b") })
	check(t, "carriage returns stay", func(t *testing.T) { takes(t, "", "a\r\nb", "a\r", "b") })
	check(t, "one line", func(t *testing.T) { takes(t, "", "a", "a") })
	check(t, "binary=false", func(t *testing.T) { takes(t, "&binary=false", "a\nb", "a", "b") })
	check(t, "binary=0", func(t *testing.T) { takes(t, "&binary=0", "a\nb", "a", "b") })
	check(t, "binary=true", func(t *testing.T) { takes(t, "&binary=true", binaryBody("a\nb", "c"), "a\nb", "c") })
	check(t, "binary=1", func(t *testing.T) { takes(t, "&binary=1", binaryBody("a", "b"), "a", "b") })
	check(t, "binary=true, with more behind", func(t *testing.T) { takes(t, "&binary=true", binaryBody("a", "b")+"\n", "a", "b") })
	check(t, "binary=true, fewer counted than sent", func(t *testing.T) {
		takes(t, "&binary=true", "\x00\x00\x00\x01"+binaryBody("a", "b")[4:], "a")
	})
	check(t, "nothing", func(t *testing.T) {
		n := common(t)
		topic := n.topic()
		for _, body := range []string{"", "\n", "\n\n\n"} {
			if r := n.post(t, "/mpub?topic="+topic, body); r.status != http.StatusOK {
				t.Errorf("%q: %d %s", body, r.status, r.body)
			}
		}
		if s, _ := n.lookup(t, topic); s.MessageCount != 0 {
			t.Errorf("got %+v", s)
		}
	})
	check(t, "defer", func(t *testing.T) {
		// Documented since 1.3.0; a broker that does not know it delivers at once.
		n := common(t)
		topic := n.topic()
		c := n.consumer(t, topic, "ch").rdy(2)
		if r := n.post(t, "/mpub?topic="+topic+"&defer=100", "a\nb"); r.status != http.StatusOK {
			t.Fatalf("got %d %s", r.status, r.body)
		}
		c.bodies(2)
	})
	check(t, "without a topic", func(t *testing.T) {
		common(t).post(t, "/mpub", "x").refused(t, 400, "MISSING_ARG_TOPIC")
	})
	check(t, "too big", func(t *testing.T) {
		n := start(t, "--max-msg-size=100", "--max-body-size=1000")
		topic := n.topic()
		n.post(t, "/mpub?topic="+topic, "x\n"+strings.Repeat("x", 101)).refused(t, 413, "MSG_TOO_BIG")
		n.post(t, "/mpub?topic="+topic, strings.Repeat("x\n", 501)).refused(t, 413, "BODY_TOO_BIG")
		if s, _ := n.lookup(t, topic); s.MessageCount != 0 {
			t.Errorf("got %+v", s)
		}
		if r := n.post(t, "/mpub?topic="+topic, strings.Repeat("x\n", 500)); r.status != http.StatusOK {
			t.Errorf("500 messages: %d %s", r.status, r.body)
		}
		if s := mustLookup(t, n, topic); s.MessageCount != 500 {
			t.Errorf("got %+v", s)
		}
	})
}

func TestHTTPMpubBinaryFaults(t *testing.T) {
	group(t)
	number := func(v ...uint32) (s string) {
		for _, v := range v {
			s += string(binary.BigEndian.AppendUint32(nil, v))
		}
		return s
	}
	for name, f := range map[string]struct{ body, code string }{
		"nothing":                {"", "BAD_BODY"},
		"3 bytes":                {"abc", "BAD_BODY"},
		"no messages":            {number(0), "BAD_BODY"},
		"more than fit":          {number(1 + (maxBody-4)/5), "BAD_BODY"},
		"message of 0":           {number(1, 0), "BAD_MESSAGE"},
		"fewer than counted":     {number(2, 1) + "x", "BAD_MESSAGE"},
		"message cut":            {number(1, 5) + "ab", "BAD_MESSAGE"},
		"message larger than 1M": {number(1, maxMessage+1) + "x", "BAD_MESSAGE"},
	} {
		check(t, name, func(t *testing.T) {
			n := common(t)
			topic := n.topic()
			r := n.post(t, "/mpub?topic="+topic+"&binary=true", f.body)
			if s, _ := n.lookup(t, topic); s.MessageCount != 0 {
				t.Errorf("%d messages were accepted", s.MessageCount)
			}
			if r.status < 400 || r.status >= 500 {
				t.Fatalf("got %d %s", r.status, r.body)
			}
			r.refused(t, 413, f.code)
		})
	}
}
