package service

import (
	"context"
	"net"
	"strings"
	"sync"
	"testing"

	"golang.org/x/net/dns/dnsmessage"
	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/srtm-io/srtm/internal/testkit"
)

// In a container network without a route to the world, a name server answers questions about the names of
// containers at once, and other questions after seconds. gRPC's default is to request a TXT record, too.
func TestDialAsksForNoTextRecord(t *testing.T) {
	server, ln := grpc.NewServer(), testkit.Listen(t)
	go func() { _ = server.Serve(ln) }()
	t.Cleanup(server.Stop)
	names := testkit.Result(net.ListenPacket("udp", "127.0.0.1:0")).Must(t)
	var mu sync.Mutex
	asked := map[dnsmessage.Type]bool{}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		buffer := make([]byte, 4096)
		for {
			size, from, err := names.ReadFrom(buffer)
			if err != nil {
				return
			}
			var m dnsmessage.Message
			if m.Unpack(buffer[:size]) != nil || len(m.Questions) != 1 {
				continue
			}
			question := m.Questions[0]
			mu.Lock()
			asked[question.Type] = true
			mu.Unlock()
			m.Response, m.Additionals = true, nil
			switch {
			case !strings.HasPrefix(question.Name.String(), "control.test."):
				m.RCode = dnsmessage.RCodeNameError
			case question.Type == dnsmessage.TypeA:
				m.Answers = []dnsmessage.Resource{{
					Header: dnsmessage.ResourceHeader{Name: question.Name, Type: question.Type, Class: question.Class},
					Body:   &dnsmessage.AResource{A: [4]byte{127, 0, 0, 1}},
				}}
			}
			if answer, err := m.Pack(); err == nil {
				_, _ = names.WriteTo(answer, from)
			}
		}
	}()
	t.Cleanup(func() { names.Close(); <-ended })
	before := net.DefaultResolver
	t.Cleanup(func() { net.DefaultResolver = before })
	net.DefaultResolver = &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "udp", names.LocalAddr().String())
	}}

	_, port, _ := net.SplitHostPort(ln.Addr().String())
	conn := testkit.Result(Dial("control.test:"+port, grpc.WithTransportCredentials(insecure.NewCredentials()))).Must(t)
	t.Cleanup(func() { conn.Close() })
	for conn.Connect(); conn.GetState() != connectivity.Ready; {
		if !conn.WaitForStateChange(t.Context(), conn.GetState()) {
			t.Fatal("no connection")
		}
	}
	mu.Lock()
	defer mu.Unlock()
	if !asked[dnsmessage.TypeA] || asked[dnsmessage.TypeTXT] || asked[dnsmessage.TypeSRV] {
		t.Errorf("the name server was queried for %v", asked)
	}
}

func TestWithPort(t *testing.T) {
	for address, want := range map[string]string{
		"localhost": "localhost:4170", "localhost:1": "localhost:1", "a,b:2,c": "a:4170,b:2,c:4170", "::1": "[::1]:4170", "[::1]": "[::1]:4170",
		"[::1]:5": "[::1]:5", "10.0.0.1": "10.0.0.1:4170", "": "", ":4171": ":4171", "a:b:c": "a:b:c", "http://a": "http://a", "/run/s": "/run/s",
	} {
		testkit.Equal(t, WithPort(address, LoaddistributorPort), want, "%q", address)
	}
	testkit.Equal(t, WithPort("localhost", ""), "localhost")
}

func TestFlags(t *testing.T) {
	var one string
	f := AddressFlag(&one, "localhost", NSQPort)
	testkit.Equal(t, one, "localhost:4150", "default")
	testkit.Must(t, f.Set("a,b:1"))
	testkit.Equal(t, one, "a:4150,b:1", "given")
	testkit.Must(t, f.Set(""))
	testkit.Equal(t, f.String(), "", "empty")

	var several []string
	f = AddressesFlag(&several, NSQHTTPPort)
	testkit.Equal(t, f.String(), "", "none")
	for _, value := range []string{"a,b:1", "https://c", "::1"} {
		testkit.Must(t, f.Set(value))
	}
	testkit.EqualSlices(t, several, []string{"a:4151", "b:1", "https://c", "[::1]:4151"}, "given")
}
