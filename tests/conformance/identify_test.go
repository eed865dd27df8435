package conformance

import (
	"fmt"
	"net"
	"strings"
	"testing"
)

// Defaults as the documentation gives them.
var negotiated = map[string]any{
	"max_rdy_count":         2500.0,
	"max_msg_timeout":       900_000.0,
	"msg_timeout":           60_000.0,
	"tls_v1":                false,
	"deflate":               false,
	"deflate_level":         6.0,
	"max_deflate_level":     6.0,
	"snappy":                false,
	"sample_rate":           0.0,
	"auth_required":         false,
	"output_buffer_size":    16384.0,
	"output_buffer_timeout": 250.0,
}

func TestIdentify(t *testing.T) {
	group(t)
	check(t, "without feature negotiation", func(t *testing.T) {
		n := common(t)
		p := n.open(t)
		p.raw(identity(t, map[string]any{"client_id": "a", "hostname": "b", "heartbeat_interval": 2000}))
		p.ok()
		p.alive(n)
	})
	check(t, "empty object", func(t *testing.T) {
		p := common(t).open(t)
		p.raw(sized("IDENTIFY", "{}"))
		p.ok()
	})
	check(t, "answer", func(t *testing.T) {
		n := common(t)
		p := n.open(t)
		answer := p.identify(nil)
		for key, want := range negotiated {
			if got, there := answer[key]; !there || got != want {
				t.Errorf("%s: got %v (there: %t), want %v", key, got, there, want)
			}
		}
		if v, _ := answer["version"].(string); v == "" || strings.ContainsAny(v, "\n") {
			t.Errorf("version: got %v", answer["version"])
		}
		p.alive(n)
	})
	check(t, "fields nobody knows are ignored", func(t *testing.T) {
		n := common(t)
		p := n.open(t)
		p.identify(map[string]any{"unheard_of": map[string]any{"a": []int{1}}, "another": nil})
		p.alive(n)
	})
	check(t, "tls_v1 where it is not configured", func(t *testing.T) {
		n := common(t)
		p := n.open(t)
		if answer := p.identify(map[string]any{"tls_v1": true}); answer["tls_v1"] != false {
			t.Errorf("tls_v1: got %v", answer["tls_v1"])
		}
		p.round(n)
	})
	for _, feature := range []string{"tls_v1", "snappy", "deflate"} {
		check(t, feature+" without feature negotiation", func(t *testing.T) {
			n := common(t)
			p := n.open(t)
			p.raw(identity(t, map[string]any{feature: true}))
			p.ok()
			p.round(n)
		})
	}
	check(t, "twice", func(t *testing.T) {
		p := common(t).open(t)
		p.identify(map[string]any{"msg_timeout": 5000})
		if answer := p.identify(map[string]any{"msg_timeout": 6000}); answer["msg_timeout"] != 6000.0 {
			t.Errorf("msg_timeout: got %v, want that of the later one, 6000", answer["msg_timeout"])
		}
	})
	check(t, "after SUB", func(t *testing.T) {
		n := common(t)
		p := n.consumer(t, n.topic(), "ch")
		p.raw(identity(t, nil))
		p.fatal("E_INVALID")
	})
	check(t, "after PUB", func(t *testing.T) {
		n := common(t)
		p := n.open(t)
		p.alive(n)
		p.identify(nil)
		p.alive(n)
	})
	for name, body := range map[string]string{
		"not JSON":                 "{",
		"an array":                 "[]",
		"a string":                 `"x"`,
		"interval of a wrong type": `{"heartbeat_interval":"1000"}`,
		"client_id of wrong type":  `{"client_id":5}`,
		"fraction":                 `{"heartbeat_interval":1000.5}`,
		"binary":                   "\x00\x01\x02",
	} {
		check(t, "body is "+name, func(t *testing.T) {
			p := common(t).open(t)
			p.raw(sized("IDENTIFY", body))
			p.fatal("E_BAD_BODY")
		})
	}
	check(t, "body of more than 64 KiB", func(t *testing.T) {
		p := common(t).open(t)
		p.raw(sized("IDENTIFY", `{"more":"`+strings.Repeat("x", 64<<10)+`"}`))
		if unlike(t, "identity-size") {
			p.fatal("E_BAD_BODY")
		} else {
			p.ok()
		}
	})
	for name, size := range map[string]int32{"0": 0, "-1": -1, "min": -1 << 31, "max body size + 1": 5<<20 + 1, "max": 1<<31 - 1} {
		check(t, "body size "+name, func(t *testing.T) {
			p := common(t).open(t)
			p.raw(claimed("IDENTIFY", size, ""))
			p.fatal("E_BAD_BODY")
		})
	}
}

func TestIdentifyRanges(t *testing.T) {
	group(t)
	for _, r := range []struct {
		field string
		good  map[int]any // what is asked for, and what the answer must say
		bad   []int
	}{
		{"output_buffer_size", map[int]any{0: 16384.0, 64: 64.0, 16384: 16384.0, 65536: 65536.0}, []int{63, 1, -2, 65537}},
		{"output_buffer_timeout", map[int]any{0: 250.0, 25: 25.0, 1000: 1000.0, 30000: 30000.0}, []int{-2, 1, 24, 30001}},
		{"sample_rate", map[int]any{0: 0.0, 1: 1.0, 99: 99.0}, []int{-1, 100, 1000}},
		{"msg_timeout", map[int]any{0: 60000.0, 1000: 1000.0, 900000: 900000.0}, []int{-1, 1, 999, 900001}},
		{"heartbeat_interval", map[int]any{-1: nil, 0: nil, 1000: nil, 60000: nil}, []int{-2, 1, 999, 60001}},
	} {
		for ask, want := range r.good {
			check(t, fmt.Sprintf("%s %d", r.field, ask), func(t *testing.T) {
				n := common(t)
				p := n.open(t)
				answer := p.identify(map[string]any{r.field: ask})
				if want != nil && answer[r.field] != want {
					t.Errorf("got %v, want %v", answer[r.field], want)
				}
				p.alive(n)
			})
		}
		for _, ask := range r.bad {
			check(t, fmt.Sprintf("%s %d", r.field, ask), func(t *testing.T) {
				p := common(t).open(t)
				p.raw(identity(t, map[string]any{r.field: ask, "feature_negotiation": true}))
				p.fatal("E_BAD_BODY")
			})
		}
	}
	check(t, "error names the field", func(t *testing.T) {
		p := common(t).open(t)
		p.raw(identity(t, map[string]any{"heartbeat_interval": 1}))
		if text := p.fault("E_BAD_BODY"); !strings.Contains(text, "heartbeat interval (1) is invalid") {
			t.Errorf("text is %q, which client libraries' own tests do not take", text)
		}
	})
}

func TestIdentifyFlags(t *testing.T) {
	group(t)
	check(t, "limits and defaults by flag", func(t *testing.T) {
		n := start(t, "--max-rdy-count=7", "--msg-timeout=3s", "--max-msg-timeout=5s", "--max-heartbeat-interval=2s",
			"--max-output-buffer-size=1000", "--max-output-buffer-timeout=2s", "--min-output-buffer-timeout=100ms",
			"--output-buffer-timeout=150ms")
		answer := n.open(t).identify(map[string]any{"output_buffer_size": 1000})
		for key, want := range map[string]float64{"max_rdy_count": 7, "msg_timeout": 3000, "max_msg_timeout": 5000, "output_buffer_timeout": 150, "output_buffer_size": 1000} {
			if answer[key] != want {
				t.Errorf("%s: got %v, want %v", key, answer[key], want)
			}
		}
		for field, value := range map[string]int{"heartbeat_interval": 2001, "output_buffer_size": 1001, "output_buffer_timeout": 99, "msg_timeout": 5001} {
			p := n.open(t)
			p.raw(identity(t, map[string]any{field: value}))
			p.fatal("E_BAD_BODY")
		}
		p := n.open(t)
		p.raw(identity(t, map[string]any{"output_buffer_timeout": 2001}))
		p.fatal("E_BAD_BODY")
		p = n.open(t)
		p.identify(map[string]any{"heartbeat_interval": 2000, "output_buffer_timeout": 100, "msg_timeout": 5000})
		p.alive(n)
	})
}

// What a client says of itself is what /stats says of it.
func TestIdentityInStats(t *testing.T) {
	group(t)
	client := func(t *testing.T, fields map[string]any) clientStats {
		n := common(t)
		topic := n.topic()
		p := n.open(t)
		p.identify(fields)
		p.sub(topic, "ch")
		var c clientStats
		n.settle(t, topic, "ch", func(s channelStats) bool {
			if len(s.Clients) == 1 {
				c = s.Clients[0]
			}
			return len(s.Clients) == 1
		})
		if local := p.nc.LocalAddr().String(); c.RemoteAddress != local {
			t.Errorf("remote_address %q, want %q", c.RemoteAddress, local)
		}
		return c
	}
	check(t, "client_id, hostname, user_agent", func(t *testing.T) {
		c := client(t, map[string]any{"client_id": "me", "hostname": "here.example", "user_agent": "probe/1.0", "sample_rate": 42})
		if c.ClientID != "me" || c.Hostname != "here.example" || c.UserAgent != "probe/1.0" || c.SampleRate != 42 {
			t.Errorf("got %+v", c)
		}
	})
	check(t, "without IDENTIFY the address stands in", func(t *testing.T) {
		n := common(t)
		topic := n.topic()
		p := n.consumer(t, topic, "ch")
		host, _, err := net.SplitHostPort(p.nc.LocalAddr().String())
		if err != nil {
			t.Fatal(err)
		}
		n.settle(t, topic, "ch", func(s channelStats) bool {
			return len(s.Clients) == 1 && s.Clients[0].ClientID == host && s.Clients[0].Hostname == host && s.Clients[0].UserAgent == ""
		})
	})
	check(t, "long texts", func(t *testing.T) {
		text := strings.Repeat("x", 256)
		c := client(t, map[string]any{"client_id": text, "hostname": text, "user_agent": text})
		if c.ClientID != text || c.Hostname != text || c.UserAgent != text {
			t.Errorf("got %+v", c)
		}
	})
	check(t, "longer texts", func(t *testing.T) {
		n := common(t)
		for _, field := range []string{"client_id", "hostname", "user_agent"} {
			p := n.open(t)
			p.raw(identity(t, map[string]any{field: strings.Repeat("x", 257)}))
			if unlike(t, "identity-text") {
				p.fatal("E_BAD_BODY")
			} else {
				p.ok()
			}
		}
	})
	check(t, "not ASCII", func(t *testing.T) {
		c := client(t, map[string]any{"client_id": "sensor-ü-\u2603"})
		if c.ClientID != "sensor-ü-\u2603" {
			t.Errorf("got %q", c.ClientID)
		}
	})
}
