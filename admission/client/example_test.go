package client_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"

	"github.com/srtm-io/srtm/admission/client"
	"github.com/srtm-io/srtm/admission/rule"
	"github.com/srtm-io/srtm/admission/server"
	"github.com/srtm-io/srtm/admission/store"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/tokenbucket"
)

// user17 starts a server. The key user/17 has 2 credits, and gains a credit in a thousand seconds. In
// production an operator starts `admission --role=all`.
func user17() (address string, stop func()) {
	folder, err := os.MkdirTemp("", "admission")
	if err != nil {
		panic(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	s, err := store.Open(ctx, filepath.Join(folder, "admission.db"))
	if err != nil {
		panic(err)
	}
	if _, err := s.SetRules(ctx, []rule.Rule{{Key: "user/17", Share: tokenbucket.Share{Rate: 1, Burst: 2}}}); err != nil {
		panic(err)
	}
	srv, err := server.New(ctx, server.Config{Address: "127.0.0.1:0", Store: server.NewStore(s)})
	if err != nil {
		panic(err)
	}
	ended := make(chan error)
	go func() { ended <- errors.Join(srv.Run(ctx), s.Close(), os.RemoveAll(folder)) }()
	return srv.Addr().String(), func() {
		cancel()
		if err := <-ended; err != nil && !errors.Is(err, context.Canceled) {
			panic(err)
		}
	}
}

// The key user/17 has 2 credits. A third request within a thousand seconds is denied.
func ExampleClient_Ask() {
	address, stop := user17()
	defer stop()
	c, err := client.New(client.Config{
		Servers: []string{address},
		Wait:    testkit.Hang, Attempts: 10_000, // the machine of a test may stop for seconds
	})
	if err != nil {
		panic(err)
	}
	defer c.Close()
	for range 3 {
		d := c.Ask(context.Background(), "user/17", 1)
		fmt.Println(d.Admit, d.Left)
	}
	// Output:
	// true 1
	// true 0
	// false 0
}

// Limit puts the question before a handler: the header X-User is the key.
func ExampleClient_Limit() {
	address, stop := user17()
	defer stop()
	c, err := client.New(client.Config{
		Servers: []string{address},
		Wait:    testkit.Hang, Attempts: 10_000, // the machine of a test may stop for seconds
	})
	if err != nil {
		panic(err)
	}
	defer c.Close()
	handler := c.Limit(
		func(r *http.Request) string { return "user/" + r.Header.Get("X-User") },
		http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, "hello") }))

	for range 3 {
		request := httptest.NewRequest(http.MethodGet, "/", nil)
		request.Header.Set("X-User", "17")
		answer := httptest.NewRecorder()
		handler.ServeHTTP(answer, request)
		fmt.Println(answer.Code)
	}
	// Output:
	// 200
	// 200
	// 429
}
