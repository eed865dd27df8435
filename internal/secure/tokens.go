package secure

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"os"
	"strings"
	"sync/atomic"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
)

// minToken is the minimum length of a token in bytes. 128 bits in hexadecimal are 32
// bytes, and much shorter tokens can be guessed.
const minToken = 16

// maxTokens bounds a token file, and maxTenant a tenant's name in bytes.
const (
	maxTokens = 1000
	maxTenant = 64
)

// tokens are the accepted tokens by digest. A comparison of digests reveals nothing about
// a guess by its timing. Names of certificates, with their prefix, have a separate map,
// so no token counts as a certificate.
type tokens struct {
	byDigest map[[sha256.Size]byte]grant
	byName   map[string]grant
}

// grant is the permission of one line of a file.
type grant struct {
	role   Role
	broker string // for a node: the only broker that it may be; "": any
	tenant string // for other roles; see Tenant
}

// certPrefix begins the name of a certificate in the place of a token.
const certPrefix = "cert:"

// token returns the grant of a token; false if the token is not in the file.
func (t tokens) token(token string) (grant, bool) {
	may, known := t.byDigest[sha256.Sum256([]byte(token))]
	return may, known
}

// certificate returns the grant of the first known name of a certificate: its subject's
// common name, its DNS names, its URIs.
func (t tokens) certificate(c *x509.Certificate) (grant, bool) {
	names := append([]string{c.Subject.CommonName}, c.DNSNames...)
	for _, uri := range c.URIs {
		names = append(names, uri.String())
	}
	for _, name := range names {
		if may, known := t.byName[certPrefix+name]; known {
			return may, true
		}
	}
	return grant{}, false
}

// Tokens are the tokens of a server's file, reloaded when the file changes.
type Tokens struct{ tokens *fresh[tokens] }

// Log sets the log of changes of the file.
func (t *Tokens) Log(log *slog.Logger) { t.tokens.Log(log) }

// LoadTokens reads the file of the flag, or returns all its faults.
func LoadTokens(flag, path string) (*Tokens, error) {
	return loadTokens(&atomic.Pointer[slog.Logger]{}, flag, path)
}

func loadTokens(log *atomic.Pointer[slog.Logger], flag, path string) (*Tokens, error) {
	f, err := newFresh(log, func() (tokens, error) {
		t, err := readTokens(path)
		if err != nil {
			return t, fmt.Errorf("%s: %w", flag, err)
		}
		return t, nil
	}, path)
	if err != nil {
		return nil, err
	}
	return &Tokens{f}, nil
}

// Check returns the reason why the caller lacks the role, or "". known reports whether
// the caller is known. Admin is for operators and not for tenants.
func (t *Tokens) Check(r *http.Request, need Role) (problem string, known bool) {
	may, problem, known := t.check(r.Header.Get("Authorization"), r.TLS, need)
	if problem == "" && need == Admin && may.tenant != "" {
		problem = operatorsOnly(may.tenant)
	}
	return problem, known
}

// check is Check for an Authorization header and a connection; nil state: without TLS. A
// token in the header counts. Without a token the connection's verified certificate
// counts.
func (t *Tokens) check(header string, state *tls.ConnectionState, need Role) (may grant, problem string, known bool) {
	if need == Unauthenticated {
		return grant{}, "", false
	}
	kind := "token"
	verified := state != nil && len(state.VerifiedChains) > 0
	if token := TokenOf(header); token != "" {
		if may, known = t.tokens.get().token(token); !known {
			return grant{}, badToken, false
		}
	} else {
		if verified {
			kind = "certificate"
			may, known = t.tokens.get().certificate(state.VerifiedChains[0][0])
		}
		if !known {
			return grant{}, noToken, false
		}
	}
	if may.role < need {
		return grant{}, fmt.Sprintf("the %s's role is %v, and this takes %v", kind, may.role, need), true
	}
	if need == Node && may.tenant != "" {
		return grant{}, fmt.Sprintf("the %s is tenant %s's, and this takes a node's", kind, may.tenant), true
	}
	if may.tenant == "" {
		may.tenant = organisation(state)
	}
	return may, "", true
}

// Tenant returns the tenant of an HTTP request: the third word of its token's line,
// otherwise the organisation of its verified certificate; "" without. t may be nil.
func (t *Tokens) Tenant(r *http.Request) string {
	if t != nil {
		if may, _, known := t.check(r.Header.Get("Authorization"), r.TLS, ReadOnly); known {
			return may.tenant
		}
	}
	return organisation(r.TLS)
}

// WithTenant returns a context of a call by the given tenant.
func WithTenant(ctx context.Context, tenant string) context.Context {
	return context.WithValue(ctx, tenantKey{}, tenant)
}

// tenantKey is the context key of a call's tenant.
type tenantKey struct{}

// Tenant is Tokens.Tenant for a gRPC call.
func Tenant(ctx context.Context) string {
	if tenant, ok := ctx.Value(tenantKey{}).(string); ok {
		return tenant
	}
	return organisation(stateOf(ctx))
}

func stateOf(ctx context.Context) *tls.ConnectionState {
	if p, ok := peer.FromContext(ctx); ok {
		if info, ok := p.AuthInfo.(credentials.TLSInfo); ok {
			return &info.State
		}
	}
	return nil
}

// organisation returns the organisation percent-encoded, as in a URL's path, because it
// becomes part of keys.
func organisation(state *tls.ConnectionState) string {
	if state == nil || len(state.VerifiedChains) == 0 || len(state.VerifiedChains[0][0].Subject.Organization) == 0 {
		return ""
	}
	return url.PathEscape(state.VerifiedChains[0][0].Subject.Organization[0])
}

// TokenOf returns the token of an Authorization header; "" without.
func TokenOf(header string) string {
	scheme, token, _ := strings.Cut(header, " ")
	if !strings.EqualFold(scheme, "bearer") {
		return ""
	}
	return strings.TrimSpace(token)
}

// Problems of a token.
const (
	noToken  = "a token is needed (Authorization: Bearer TOKEN)"
	badToken = "the token is not known"
)

// readTokens reads the clients of a server: one line per token or certificate name. A
// line has the role first and last, optionally, the one broker of a node or the tenant of
// another role. Empty lines and lines that begin with # are ignored. readTokens returns
// all faults, without any token in them.
func readTokens(path string) (tokens, error) {
	all := tokens{map[[sha256.Size]byte]grant{}, map[string]grant{}}
	text, err := os.ReadFile(path)
	if err != nil {
		return all, err
	}
	var errs []error
	lines := bufio.NewScanner(bytes.NewReader(text))
	for n := 1; lines.Scan(); n++ {
		fields := strings.Fields(lines.Text())
		if len(fields) == 0 || strings.HasPrefix(fields[0], "#") {
			continue
		}
		fault := func(format string, args ...any) {
			errs = append(errs, fmt.Errorf("%s:%d: %s", path, n, fmt.Sprintf(format, args...)))
		}
		role, known := parseRole(fields[0])
		may := grant{role: role}
		if len(fields) == 3 && role == Node {
			may.broker = fields[2]
		} else if len(fields) == 3 {
			may.tenant = fields[2]
		}
		switch {
		case !known:
			fault("want a role (read-only, node or admin) and a token or %sNAME", certPrefix)
			continue
		case len(fields) < 2 || len(fields) > 3:
			fault("%d words, want a role, a token or %sNAME, and for a node its broker id, for others a tenant", len(fields), certPrefix)
			continue
		case len(may.tenant) > maxTenant || url.PathEscape(may.tenant) != may.tenant:
			fault("tenant %.80q: want 1 to %d bytes that need no %%XX in the path of a URL", may.tenant, maxTenant)
			continue
		case len(all.byDigest)+len(all.byName) == maxTokens:
			return all, errors.Join(append(errs, fmt.Errorf("%s: more than %d tokens", path, maxTokens))...)
		}
		name, isName := strings.CutPrefix(fields[1], certPrefix)
		digest := sha256.Sum256([]byte(fields[1]))
		_, twice := all.byDigest[digest]
		_, same := all.byName[fields[1]]
		switch {
		case isName && name == "":
			fault("want the name of a certificate after %s", certPrefix)
		case !isName && len(fields[1]) < minToken:
			fault("the token has %d bytes, want at least %d", len(fields[1]), minToken)
		case twice:
			fault("the token is there already")
		case same:
			fault("%s is there already", fields[1])
		case isName:
			all.byName[fields[1]] = may
		default:
			all.byDigest[digest] = may
		}
	}
	if err := lines.Err(); err != nil {
		errs = append(errs, fmt.Errorf("%s: %w", path, err))
	}
	if len(all.byDigest)+len(all.byName) == 0 && len(errs) == 0 {
		errs = append(errs, fmt.Errorf("%s: no token", path))
	}
	return all, errors.Join(errs...)
}

// readToken reads the one token of a client: the file's only word, or a line as in a
// server's file.
func readToken(path string) (string, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return "", err
	}
	fields := strings.Fields(string(text))
	if len(fields) == 2 || len(fields) == 3 {
		if _, known := parseRole(fields[0]); known {
			fields = fields[1:2]
		}
	}
	if len(fields) != 1 {
		return "", fmt.Errorf("%s: %d words, want one token", path, len(fields))
	}
	if len(fields[0]) < minToken {
		return "", fmt.Errorf("%s: the token has %d bytes, want at least %d", path, len(fields[0]), minToken)
	}
	return fields[0], nil
}
