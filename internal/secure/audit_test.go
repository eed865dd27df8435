package secure

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/testkit"
)

// lines collects a log.
type lines struct {
	mu    sync.Mutex
	b     bytes.Buffer
	wrote chan struct{} // holds one token: lines were written
}

func newLines() *lines { return &lines{wrote: make(chan struct{}, 1)} }

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	select {
	case l.wrote <- struct{}{}:
	default:
	}
	return l.b.Write(p)
}

// take returns the audit lines so far, without time and level, and removes them.
func (l *lines) take(t *testing.T) (all []map[string]any) {
	t.Helper()
	l.mu.Lock()
	defer l.mu.Unlock()
	for line := range strings.Lines(l.b.String()) {
		for _, token := range []string{lookToken, nodeToken, adminToken, "wrong-0123456789abcdef"} {
			if strings.Contains(line, token) {
				t.Errorf("a token is in the log: %s", line)
			}
		}
		var m map[string]any
		testkit.Must(t, json.Unmarshal([]byte(line), &m))
		if m["msg"] == "audit" {
			host, _, err := net.SplitHostPort(fmt.Sprint(m["remote"]))
			if err != nil || host != "127.0.0.1" && host != "192.0.2.1" {
				t.Errorf("from where? %s", line)
			}
			delete(m, "msg")
			delete(m, "time")
			delete(m, "level")
			delete(m, "remote")
			all = append(all, m)
		}
	}
	l.b.Reset()
	return all
}

func token(of string) string {
	sum := sha256.Sum256([]byte(of))
	return fmt.Sprintf("token %x", sum[:4])
}

type operated struct {
	srtmv1.UnimplementedAdminServiceServer
}

func (operated) DeleteTopic(_ context.Context, r *srtmv1.DeleteTopicRequest) (*srtmv1.DeleteTopicResponse, error) {
	if r.GetName() == "none" {
		return nil, status.Error(codes.NotFound, "there is none")
	}
	return &srtmv1.DeleteTopicResponse{}, nil
}

func (operated) ListTopics(context.Context, *srtmv1.ListTopicsRequest) (*srtmv1.ListTopicsResponse, error) {
	return &srtmv1.ListTopicsResponse{}, nil
}

func (operated) CreateTopic(_ *srtmv1.CreateTopicRequest, s grpc.ServerStreamingServer[srtmv1.CreateTopicResponse]) error {
	return s.Send(&srtmv1.CreateTopicResponse{})
}

// Each call that changes something is a line of the log: the caller, the change and the result.
func TestAuditLogsEachChange(t *testing.T) {
	s := testkit.Result(ServerConfig{TokenFile: tokenFile(t)}.Load()).Must(t)
	log := newLines()
	s.Log(slog.New(slog.NewJSONHandler(log, nil)))
	server := grpc.NewServer(s.Options()...)
	srtmv1.RegisterAdminServiceServer(server, operated{})
	address := testkit.Serve(t, server)
	as := func(token string) srtmv1.AdminServiceClient {
		options := []grpc.DialOption{grpc.WithTransportCredentials(insecure.NewCredentials())}
		if token != "" {
			options = append(options, grpc.WithPerRPCCredentials(Bearer(func() string { return token })))
		}
		conn := testkit.Result(grpc.NewClient(address, options...)).Must(t)
		t.Cleanup(func() { conn.Close() })
		return srtmv1.NewAdminServiceClient(conn)
	}
	expect := func(want ...string) {
		t.Helper()
		// The line of a call may be written after the caller has the answer.
		var got []map[string]any
		hang := time.NewTimer(testkit.Hang)
		defer hang.Stop()
		for len(got) < len(want) {
			select {
			case <-log.wrote:
			case <-hang.C:
				t.Fatalf("the log has %v, want %q", got, want)
			}
			got = append(got, log.take(t)...)
		}
		var texts []string
		for _, m := range got {
			text, _ := json.Marshal(m) // in the order of the keys
			texts = append(texts, string(text))
		}
		if strings.Join(texts, "\n") != strings.Join(want, "\n") {
			t.Errorf("the log has\n%s\nwant\n%s", strings.Join(texts, "\n"), strings.Join(want, "\n"))
		}
	}
	ctx := t.Context()
	admin := as(adminToken)
	_, _ = admin.DeleteTopic(ctx, &srtmv1.DeleteTopicRequest{Name: "orders"})
	_, _ = admin.ListTopics(ctx, &srtmv1.ListTopicsRequest{})
	expect(`{"call":"DeleteTopic","result":"OK","topic":"orders","who":"` + token(adminToken) + `"}`)
	_, _ = admin.DeleteTopic(ctx, &srtmv1.DeleteTopicRequest{Name: "none"})
	expect(`{"call":"DeleteTopic","result":"NotFound","topic":"none","who":"` + token(adminToken) + `"}`)
	stream, err := admin.CreateTopic(ctx, &srtmv1.CreateTopicRequest{Spec: &srtmv1.TopicSpec{Name: strings.Repeat("x", 200)}})
	for err == nil {
		_, err = stream.Recv()
	}
	expect(`{"call":"CreateTopic","result":"OK","topic":"` + strings.Repeat("x", maxObject) + `","who":"` + token(adminToken) + `"}`)
	_, _ = as(lookToken).DeleteTopic(ctx, &srtmv1.DeleteTopicRequest{Name: "orders"})
	expect(`{"call":"DeleteTopic","result":"PermissionDenied","who":"` + token(lookToken) + `"}`)
	_, _ = as("").DeleteTopic(ctx, &srtmv1.DeleteTopicRequest{Name: "orders"})
	expect(`{"call":"DeleteTopic","result":"Unauthenticated","who":"anonymous"}`)

	// HTTP, behind the same tokens.
	web := s.Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusAccepted) }))
	ask := func(method, target, token string) {
		r := httptest.NewRequest(method, target, nil)
		if token != "" {
			r.Header.Set("Authorization", "Bearer "+token)
		}
		web.ServeHTTP(httptest.NewRecorder(), r)
	}
	ask("GET", "/topics", adminToken)
	ask("POST", "/topic/delete?topic=a&secret=hidden", adminToken)
	expect(`{"call":"POST /topic/delete","result":"202","topic":"a","who":"` + token(adminToken) + `"}`)
	ask("POST", "/topic/delete?topic=a", "wrong-0123456789abcdef")
	expect(`{"call":"POST /topic/delete","result":"401","topic":"a","who":"` + token("wrong-0123456789abcdef") + `"}`)

	// Unauthenticated callers cannot fill the log.
	for range 5 * obs.LinesPerSecond {
		ask("POST", "/x", "")
	}
	if n := len(log.take(t)); n == 0 || n > 3*obs.LinesPerSecond {
		t.Errorf("%d lines", n)
	}
}

// If the server checks no tokens, a presented token does not identify the caller.
func TestAuditWithoutTokens(t *testing.T) {
	log := newLines()
	a := NewAuditor(slog.New(slog.NewJSONHandler(log, nil)), false)
	r := httptest.NewRequest("POST", "/topic/create?topic=t", nil)
	r.Header.Set("Authorization", "Bearer "+adminToken)
	a.HTTP(httptest.NewRecorder(), r, false, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "OK") }))
	if got := log.take(t); len(got) != 1 || got[0]["who"] != anonymous || got[0]["result"] != "200" {
		t.Errorf("%v", got)
	}
}

// Calls between daemons do not count as operators' calls.
func TestOnlyOperatorsCallsAreAudited(t *testing.T) {
	for method, want := range map[string]bool{
		srtmv1.AdminService_CreateTopic_FullMethodName: true, srtmv1.AdminService_ListTopics_FullMethodName: false,
		srtmv1.AdmissionAdmin_SetRules_FullMethodName: true, srtmv1.GrantService_ForgetBroker_FullMethodName: true,
		srtmv1.GrantService_Lead_FullMethodName: false, srtmv1.BrokerService_Session_FullMethodName: false,
	} {
		if audited(method) != want {
			t.Errorf("%s: audited %v", method, !want)
		}
	}
}
