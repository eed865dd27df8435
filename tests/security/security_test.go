package security

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
)

func TestMain(m *testing.M) { localtest.Main(m) }

// Tokens of each role.
const (
	lookToken  = "look-0123456789abcdef"
	nodeToken  = "node-0123456789abcdef"
	adminToken = "admin-0123456789abcdef"
)

// site is a loaddistributor and a tbadaptor. They serve clients with a certificate of the authority
// and a token.
type site struct {
	t         *testing.T
	authority *testkit.Authority
	client    testkit.Certificate
	rpc, web  string
}

func (s *site) file(text string) string {
	s.t.Helper()
	return testkit.File(s.t, "file", text)
}

// proof returns the flags of a client, each with a prefix.
func (s *site) proof(prefix string, cert testkit.Certificate, token string) []string {
	return []string{
		"--" + prefix + "tls-ca=" + s.authority.File, "--" + prefix + "tls-cert=" + cert.CertFile, "--" + prefix + "tls-key=" + cert.KeyFile,
		"--" + prefix + "token-file=" + s.file(token),
	}
}

func start(t *testing.T) *site {
	t.Helper()
	free := localtest.Ports(t, 4)
	s := &site{t: t, authority: testkit.NewAuthority(t), rpc: free[0], web: free[1]}
	s.client = s.authority.Certificate("client")
	server := s.authority.Certificate("server")
	guard := []string{
		"--tls-cert=" + server.CertFile, "--tls-key=" + server.KeyFile, "--tls-client-ca=" + s.authority.File,
		"--token-file=" + s.file("read-only "+lookToken+"\nnode "+nodeToken+" b1\nadmin "+adminToken+"\n"),
	}
	localtest.Run(t, localtest.Program(t, "tbadaptor"), free[3]+"/ping", append(guard, "--grpc-address="+free[2], "--http-address="+free[3])...)
	localtest.Run(t, localtest.Program(t, "loaddistributor"), s.web+"/ping", slices.Concat(guard, s.proof("tbadaptor-", s.client, adminToken), []string{
		"--grpc-address=" + s.rpc, "--http-address=" + s.web, "--tcp-address=", "--store=memory", "--open-lookup", "--tbadaptor-address=" + free[2],
	})...)
	return s
}

// broker starts an nsqd with a token.
func (s *site) broker(id, token string) *local.Process {
	s.t.Helper()
	flags := append(s.proof("control-", s.client, token), "--loaddistributor-address="+s.rpc, "--broker-id="+id, "--mcap=1000")
	return localtest.NSQD(s.t, "", flags...)
}

// srtm runs a command and returns its output and its exit code.
func (s *site) srtm(args ...string) (string, int) {
	s.t.Helper()
	return localtest.Command(s.t, localtest.Program(s.t, "tools/srtm"), append(args, "--loaddistributor-address="+s.rpc, "--timeout=1m")...)
}

func TestAClusterOfTrust(t *testing.T) {
	s := start(t)
	broker := s.broker("b1", nodeToken)
	intruder, usurper := s.broker("b2", lookToken), s.broker("b3", nodeToken)
	look, admin := s.proof("", s.client, lookToken), s.proof("", s.client, adminToken)
	testkit.WaitFor(t, "broker b1", func() bool {
		text, code := s.srtm(append([]string{"broker", "list"}, look...)...)
		return code == 0 && strings.Contains(text, "\nb1 ")
	})

	create := []string{"topic", "create", "t", "--rate=500", "--burst=500", "--slo-latency=10s", "--publisher=p1::100"}
	late, foreign := s.authority.Expired("late"), testkit.NewAuthority(t).Certificate("client")
	for name, c := range map[string]struct {
		proof []string
		want  string
	}{
		"a token to look only":   {look, "the token's role is read-only, and this takes admin"},
		"a broker's token":       {s.proof("", s.client, nodeToken), "the token's role is node, and this takes admin"},
		"an unknown token":       {s.proof("", s.client, strings.Repeat("x", 30)), "the token is not known"},
		"no token":               {look[:3], "a token is needed"},
		"no certificate":         {append(look[:1:1], admin[3]), "request failed"},
		"an old certificate":     {s.proof("", late, adminToken), "request failed"},
		"another authority's":    {s.proof("", foreign, adminToken), "request failed"},
		"no TLS":                 {admin[3:], "it may take TLS"},
		"a pair without its key": {admin[:2], "--tls-cert and --tls-key: want both or neither"},
	} {
		if text, code := s.srtm(append(create, c.proof...)...); code == 0 || !strings.Contains(text, c.want) {
			t.Errorf("%s: exit code %d, %q; want %q", name, code, text, c.want)
		}
	}
	if text, code := s.srtm(append(create, admin...)...); code != 0 {
		t.Fatalf("with everything: exit code %d, %s", code, text)
	}
	if text, code := s.srtm(append([]string{"topic", "list"}, look...)...); code != 0 || !strings.Contains(text, "t ") {
		t.Errorf("list: exit code %d, %s", code, text)
	}

	// Stock consumers can look up brokers, and nothing else.
	for path, want := range map[string]int{"/lookup?topic=t": 200, "/nodes": 200, "/metrics": 401, "/publisher?topic=t&id=p1": 401, "/debug/state": 401} {
		if _, code, err := localtest.Ask(http.MethodGet, "http://"+s.web+path, ""); code != want {
			t.Errorf("%s without a token: %d, want %d: %v", path, code, want, err)
		}
	}

	// The shares came from the tbadaptor: published messages are delivered.
	s.publishes(broker)
	testkit.WaitFor(t, "refusal of the intruder", func() bool { return strings.Contains(intruder.Output(), "PermissionDenied") })
	testkit.WaitFor(t, "refusal of the usurper", func() bool {
		return strings.Contains(usurper.Output(), "this is broker b1's token or certificate")
	})
	if text, _ := s.srtm(append([]string{"broker", "list"}, look...)...); strings.Contains(text, "\nb2 ") || strings.Contains(text, "\nb3 ") {
		t.Errorf("a broker without a token of its own has joined:\n%s", text)
	}
}

// publishes sends a message through an agent and reads it at the broker.
func (s *site) publishes(broker *local.Process) {
	t := s.t
	t.Helper()
	free := localtest.Ports(t, 2)
	flags := append([]string{"agent", "--tcp-address=" + free[0], "--http-address=" + free[1], "--loaddistributor-address=" + s.rpc}, s.proof("", s.client, lookToken)...)
	localtest.Run(t, localtest.Program(t, "tools/srtm"), free[1]+"/healthz", flags...)
	got := make(localtest.Bodies, 1)
	localtest.Consume(t, "t", "c", got, nil, broker.TCP)
	testkit.Must(t, localtest.Producer(t, free[0], "p1").Publish("t", []byte("trusted")))
	got.Want(t, "trusted")
}

func TestNobodyListensBeyondLoopbackByMistake(t *testing.T) {
	for _, c := range []struct {
		program string
		args    []string
		want    string
	}{
		{"loaddistributor", []string{"--grpc-address=0.0.0.0:0"}, "--grpc-address 0.0.0.0:0 is beyond loopback"},
		{"loaddistributor", []string{"--http-address=:0"}, "--http-address :0 is beyond loopback"},
		{"loaddistributor", []string{"--tcp-address=0.0.0.0:0"}, "--tcp-address 0.0.0.0:0 is beyond loopback"},
		{"tbadaptor", []string{"--grpc-address=[::]:0"}, "--grpc-address [::]:0 is beyond loopback"},
		{"tbadaptor", []string{"--http-address=0.0.0.0:0"}, "--http-address 0.0.0.0:0 is beyond loopback"},
		{"loaddistributor", []string{"--tcp-address=0.0.0.0:0", "--http-address=:0", "--allow-insecure-listen=tcp-address"}, "--http-address :0 is beyond loopback"},
		{"loaddistributor", []string{"--allow-insecure-listen=statsd-address"}, "is none of grpc-address, http-address, tcp-address"},
		{"tools/srtm", []string{"agent", "--allow-insecure-listen=http-address", "--tcp-address=0.0.0.0:0"}, "--tcp-address 0.0.0.0:0 is beyond loopback"},
		{"tools/srtm", []string{"agent", "--tcp-address=0.0.0.0:0"}, "--tcp-address 0.0.0.0:0 is beyond loopback"},
	} {
		if output, code := localtest.Command(t, localtest.Program(t, c.program), c.args...); code != 2 || !strings.Contains(output, c.want) {
			t.Errorf("%s %q: exit code %d, %s; want 2 and %q", c.program, c.args, code, output, c.want)
		}
	}
	free := localtest.Ports(t, 2)
	_, port, _ := strings.Cut(free[0], ":")
	localtest.Run(t, localtest.Program(t, "tbadaptor"), free[1]+"/healthz", "--grpc-address=0.0.0.0:"+port, "--http-address="+free[1], "--allow-insecure-listen=grpc-address")
}

// Clients that connect to HTTP or to nsqlookupd's port, with a token or without, take descriptors of
// the loaddistributor, but not those reserved for brokers and operators.
func TestConnectionsLeaveDescriptors(t *testing.T) {
	free := localtest.Ports(t, 3)
	localtest.Run(t, "/bin/sh", free[1]+"/ping", "-c", `ulimit -n 200 && exec "$0" "$@"`, localtest.Program(t, "loaddistributor"),
		"--grpc-address="+free[0], "--http-address="+free[1], "--tcp-address="+free[2], "--store=memory")
	for _, c := range []struct{ address, say, answer, refusal string }{
		{free[1], "GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n", "HTTP/1.1 200", "HTTP/1.1 503"},
		{free[2], "  V1PING\n", "\x00\x00\x00\x02OK", ""},
	} {
		for refused, n := false, 0; !refused; n++ {
			nc := testkit.Result(net.Dial("tcp", c.address)).Must(t)
			defer nc.Close()
			_ = nc.SetDeadline(time.Now().Add(local.Patience))
			fmt.Fprint(nc, c.say)
			answer := make([]byte, len(c.answer))
			read, err := io.ReadFull(nc, answer)
			var late net.Error
			if errors.As(err, &late) && late.Timeout() || n > 200 {
				t.Fatalf("%s: connection %d: %q, %v", c.address, n, answer[:read], err)
			}
			refused = err != nil || string(answer) == c.refusal
		}
	}
	localtest.Srtm(t, free[0], "broker", "list")
}
