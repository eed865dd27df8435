package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"unicode"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/testkit"
)

// obeyed returns what a terminal would do something for.
func obeyed(text string) string {
	return strings.Map(func(r rune) rune {
		if r != '\n' && unicode.IsControl(r) {
			return r
		}
		return -1
	}, strings.ToValidUTF8(text, "\u0080"))
}

// Whatever a server, or a client of one, calls itself: terminals obey none of it.
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
	for _, form := range []string{"table", "json"} {
		stdout, _, err := srtm(t, "", "gateway", "status", "--gateway-address", web.Listener.Addr().String(), "--output", form)
		testkit.Must(t, err)
		testkit.Equal(t, obeyed(stdout), "", "%s: in %q", form, stdout)
	}
}
