package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"testing"
	"unicode"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/testkit"
)

// obeyed returns the characters of text that a terminal would obey.
func obeyed(text string) string {
	return strings.Map(func(r rune) rune {
		if r != '\n' && unicode.IsControl(r) {
			return r
		}
		return -1
	}, strings.ToValidUTF8(text, "\u0080"))
}

// For any name of a server, or of a server's client, terminals obey no part of the name.
func TestNamesAreNoOrders(t *testing.T) {
	const name = "a\x1b]0;owned\a\u009b2J\r\nforged\tline"
	address := serve(t, &admin{
		brokers: []*srtmv1.Broker{{Id: name, Version: name, TcpAddress: name, Connected: true}},
		refuse:  status.Error(codes.FailedPrecondition, name),
	})
	web := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/status" {
			w.WriteHeader(http.StatusTeapot)
			_, _ = w.Write([]byte(strings.Repeat(name, 1e5)))
			return
		}
		_ = json.NewEncoder(w).Encode(gatewayStatus{Classes: []gatewayClass{{Name: name}}, Servers: []gatewayServer{{URL: name}}})
	}))
	defer web.Close()
	for _, args := range [][]string{
		{"broker", "list"}, {"broker", "list", "--output", "json"}, {"top"}, {"doctor"}, {"doctor", "--output", "json"},
		{"topic", "create", "x", "--rate", "1", "--burst", "1", "--slo", "99%<20ms", "--publishers", "1"},
		{"channel", "peek", "sensors", "c", "--nsqd-http-address", web.Listener.Addr().String()},
	} {
		stdout, stderr, err := srtm(t, address, args...)
		all := stdout + stderr + fmt.Sprint(err)
		if orders := obeyed(all); orders != "" || len(all) > 1e5 {
			t.Errorf("%q: %q in %d bytes, %.300q", args, orders, len(all), all)
		}
		if strings.Contains(strings.Join(args, " "), "json") && !json.Valid([]byte(stdout)) {
			t.Errorf("%q: %s", args, stdout)
		} else if args[0] == "broker" && strings.Count(stdout, "\nforged") > 0 {
			t.Errorf("%q: a line of its own: %s", args, stdout)
		}
	}
	_, stderr, err := srtm(t, serve(t, &admin{says: name}), "topic", "create", "x", "--rate", "1", "--burst", "1")
	testkit.Must(t, err)
	testkit.Equal(t, obeyed(stderr), "", "in %q", stderr)
	for _, form := range []string{"table", "json"} {
		stdout, _, err := srtm(t, "", "gateway", "status", "--gateway-address", web.Listener.Addr().String(), "--output", form)
		testkit.Must(t, err)
		testkit.Equal(t, obeyed(stdout), "", "%s: in %q", form, stdout)
	}
}

// Answers with lists of empty entries, or without an end, take about the memory of their text.
func TestHostileAnswers(t *testing.T) {
	const size = 8 << 20
	full := func(before, one, after string) string {
		return before + strings.Repeat(one+",", size/(len(one)+1)) + one + after
	}
	for _, c := range []struct {
		answer, want string
		args         []string
	}{
		{full(`{"messages":[`, `{}`, `]}`), "too many entries", []string{"channel", "peek", "t", "c", "--nsqd-http-address"}},
		{full(`{"classes":[`, `{}`, `]}`), "too many entries", []string{"gateway", "status", "--gateway-address"}},
		{full(`{"topics":[`, `{}`, `]}`), "too many entries", []string{"broker", "calibrate", "--nsqd-tcp-address=127.0.0.1:1", "--nsqd-http-address"}},
		{"", "more than", []string{"channel", "peek", "t", "c", "--nsqd-http-address"}},
		{"", "more than", []string{"gateway", "status", "--gateway-address"}},
	} {
		web := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			for c.answer == "" && r.Context().Err() == nil {
				_, _ = w.Write(make([]byte, 1<<20))
			}
			_, _ = w.Write([]byte(c.answer))
		}))
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		_, _, err := srtm(t, "", append(c.args, web.Listener.Addr().String())...)
		runtime.ReadMemStats(&after)
		testkit.ErrorHas(t, err, c.want, "%q", c.args)
		if took := after.TotalAlloc - before.TotalAlloc; c.answer != "" && took > 10*size { // most of it while reading the answer
			t.Errorf("%q: %d MiB were allocated for an answer of %d", c.args, took>>20, len(c.answer)>>20)
		}
		web.Close()
	}
}
