package secure

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"fmt"
	"log/slog"
	"net/http"
	"path"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/obs"
)

// Auditor logs the actions of operators: a line "audit" for each call that changes
// something, when the call is over or refused. The line has the caller ("token" and the
// beginning of its SHA-256, a certificate's name, or "anonymous"), the remote address,
// the action and the result. Unidentified callers cause at most obs.LinesPerSecond lines
// per second.
type Auditor struct {
	log, sparse *slog.Logger
	tokens      bool // tokens are checked; otherwise a caller may show any token
}

// NewAuditor returns an Auditor that logs to log. tokens means that the server checks
// tokens.
func NewAuditor(log *slog.Logger, tokens bool) *Auditor {
	sparse, _ := obs.Sparse(log)
	return &Auditor{log, sparse, tokens}
}

// anonymous is a caller without token and certificate.
const anonymous = "anonymous"

// maxObject bounds the logged parts of a request, in bytes each.
const maxObject = 100

func (a *Auditor) line(header string, state *tls.ConnectionState, remote, call, result string, known bool, object []any) {
	log := a.log
	if !a.tokens {
		header = ""
	}
	user := caller(header, state)
	if !known || user == anonymous {
		log = a.sparse
	}
	log.Info("audit", append([]any{"who", user, obs.KeyRemote, remote, "call", call, "result", result}, object...)...)
}

// caller names the caller without revealing the token.
func caller(header string, state *tls.ConnectionState) string {
	if token := TokenOf(header); token != "" {
		sum := sha256.Sum256([]byte(token))
		return fmt.Sprintf("token %x", sum[:4])
	}
	if state != nil && len(state.VerifiedChains) > 0 {
		return "certificate " + state.VerifiedChains[0][0].Subject.CommonName
	}
	return anonymous
}

// HTTP lets next answer the request and logs the request. refused means that next only
// refuses the caller.
func (a *Auditor) HTTP(w http.ResponseWriter, r *http.Request, refused bool, next http.Handler) {
	recorder := &statusWriter{ResponseWriter: w, code: http.StatusOK}
	defer func() {
		query := r.URL.Query()
		var object []any
		for _, key := range []string{obs.KeyTopic, obs.KeyChannel} {
			object = attribute(object, key, query.Get(key))
		}
		call := r.Method + " " + cut(r.URL.Path)
		a.line(r.Header.Get("Authorization"), r.TLS, r.RemoteAddr, call, fmt.Sprint(recorder.code), !refused, object)
	}()
	next.ServeHTTP(recorder, r)
}

// statusWriter remembers the status.
type statusWriter struct {
	http.ResponseWriter
	code int
}

func (w *statusWriter) WriteHeader(code int) {
	w.code = code
	w.ResponseWriter.WriteHeader(code)
}

// Unwrap is for http.ResponseController.
func (w *statusWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// audited reports whether a gRPC method belongs to operators and not to daemons among
// themselves.
func audited(method string) bool {
	if strings.HasPrefix(method, "/"+srtmv1.GrantService_ServiceDesc.ServiceName+"/") {
		return method == srtmv1.GrantService_ForgetBroker_FullMethodName
	}
	return needs(method) == Admin
}

// callerKey is the context key of a call's Caller.
type callerKey struct{}

// WithCaller returns a context for a call on behalf of the given Caller.
func WithCaller(ctx context.Context, name string) context.Context {
	return context.WithValue(ctx, callerKey{}, name)
}

// Caller returns Who for a gRPC call; "" if the context belongs to no call.
func Caller(ctx context.Context) string {
	if name, ok := ctx.Value(callerKey{}).(string); ok {
		return name
	}
	header, remote := callOf(ctx)
	if remote == "" {
		return ""
	}
	return caller(header, stateOf(ctx)) + " at " + remote
}

func callOf(ctx context.Context) (header, remote string) {
	if values := metadata.ValueFromIncomingContext(ctx, "authorization"); len(values) > 0 {
		header = values[0]
	}
	if p, ok := peer.FromContext(ctx); ok {
		remote = p.Addr.String()
	}
	return header, remote
}

func (a *Auditor) call(ctx context.Context, method string, request any, err error, known bool) {
	header, remote := callOf(ctx)
	a.line(header, stateOf(ctx), remote, path.Base(method), status.Code(err).String(), known, objectOf(request))
}

// objectOf returns the subject of a request.
func objectOf(request any) (object []any) {
	if r, ok := request.(interface{ GetSpec() *srtmv1.TopicSpec }); ok {
		object = attribute(object, obs.KeyTopic, r.GetSpec().GetName())
	}
	if r, ok := request.(interface{ GetTopic() string }); ok {
		object = attribute(object, obs.KeyTopic, r.GetTopic())
	}
	if r, ok := request.(interface{ GetName() string }); ok {
		object = attribute(object, obs.KeyTopic, r.GetName())
	}
	if r, ok := request.(interface{ GetChannel() string }); ok {
		object = attribute(object, obs.KeyChannel, r.GetChannel())
	}
	if r, ok := request.(interface{ GetBrokerId() string }); ok {
		object = attribute(object, obs.KeyBroker, r.GetBrokerId())
	}
	if r, ok := request.(interface{ GetKey() string }); ok {
		object = attribute(object, "key", r.GetKey())
	}
	if r, ok := request.(*srtmv1.SetRulesRequest); ok && len(r.GetRules()) > 0 {
		object = append(attribute(object, "key", r.GetRules()[0].GetKey()), obs.KeyCount, len(r.GetRules()))
	}
	return object
}

func attribute(object []any, key, value string) []any {
	if value == "" {
		return object
	}
	return append(object, key, cut(value))
}

func cut(s string) string { return s[:min(len(s), maxObject)] }

// auditUnary and auditStream log calls when they are over.
func (s *Server) auditUnary(ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
	res, err := next(ctx, req)
	if a := s.auditor.Load(); a != nil && audited(info.FullMethod) {
		a.call(ctx, info.FullMethod, req, err, true)
	}
	return res, err
}

func (s *Server) auditStream(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, next grpc.StreamHandler) error {
	a := s.auditor.Load()
	if a == nil || !audited(info.FullMethod) {
		return next(srv, stream)
	}
	var first any
	err := next(srv, examined{stream, func(m any) error {
		if first == nil {
			first = m
		}
		return nil
	}})
	a.call(stream.Context(), info.FullMethod, first, err, true)
	return err
}
