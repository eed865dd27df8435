package replicated_test

import (
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/nats-io/jwt/v2"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nkeys"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/nsqd/commitlog"
	"github.com/srtm-io/srtm/nsqd/replicated"
)

// issuer is a NATS operator with an account that may use JetStream.
type issuer struct {
	t                 *testing.T
	operator, account nkeys.KeyPair
	claims            *jwt.AccountClaims
	resolver          server.MemAccResolver
}

func public(t *testing.T, k nkeys.KeyPair) string {
	t.Helper()
	return testkit.Result(k.PublicKey()).Must(t)
}

// newAccount returns an account's key, and claims for the operator to sign.
func (i *issuer) newAccount() (nkeys.KeyPair, *jwt.AccountClaims) {
	k := testkit.Result(nkeys.CreateAccount()).Must(i.t)
	return k, jwt.NewAccountClaims(public(i.t, k))
}

func (i *issuer) sign(c *jwt.AccountClaims) {
	i.t.Helper()
	text := testkit.Result(c.Encode(i.operator)).Must(i.t)
	testkit.Must(i.t, i.resolver.Store(c.Subject, text))
}

func newIssuer(t *testing.T) (*issuer, func(*server.Options)) {
	t.Helper()
	i := &issuer{t: t}
	i.operator = testkit.Result(nkeys.CreateOperator()).Must(t)
	_, system := i.newAccount()
	i.account, i.claims = i.newAccount()
	i.claims.Limits.JetStreamLimits = jwt.JetStreamLimits{MemoryStorage: -1, DiskStorage: -1, Streams: -1, Consumer: -1}
	i.sign(system)
	i.sign(i.claims)
	return i, func(o *server.Options) {
		o.TrustedKeys, o.SystemAccount, o.AccountResolver = []string{public(t, i.operator)}, system.Subject, &i.resolver
	}
}

// user writes the credentials of a new user, and returns the user's public key.
func (i *issuer) user(file string) string {
	i.t.Helper()
	k := testkit.Result(nkeys.CreateUser()).Must(i.t)
	claims := jwt.NewUserClaims(public(i.t, k))
	text := testkit.Result(claims.Encode(i.account)).Must(i.t)
	seed := testkit.Result(k.Seed()).Must(i.t)
	creds := testkit.Result(jwt.FormatUserConfig(text, seed)).Must(i.t)
	testkit.Must(i.t, os.WriteFile(file, creds, 0o600))
	return claims.Subject
}

// A broker's credentials are revoked while the broker runs. The broker reports the failure to store,
// with the reason, and continues by itself with the next credentials in the file.
func TestCredentialsAreRevoked(t *testing.T) {
	t.Parallel()
	i, trust := newIssuer(t)
	s := startServers(t, 1, trust)
	file := filepath.Join(t.TempDir(), "broker.creds")
	config := replicated.Config{
		URL: s.url(), Credentials: file, Replicas: 1, BrokerID: "b", MaxBody: 1 << 20, Log: slog.New(slog.DiscardHandler),
	}
	user := i.user(file)
	c := testkit.Result(replicated.Connect(t.Context(), config)).Must(t)
	defer c.Close()
	l, err := c.Open("t", 0)
	testkit.Must(t, err)
	store := func() error {
		at, err := l.Append([]commitlog.Record{{Body: []byte("safe")}})
		if err == nil {
			err = l.Sync(at + 1)
		}
		return err
	}
	testkit.Must(t, store())

	i.claims.Revoke(user)
	i.sign(i.claims)
	account, err := s.all[0].LookupAccount(i.claims.Subject)
	testkit.Must(t, err)
	s.all[0].UpdateAccountClaims(account, i.claims)
	within(t, "the broker is not ready, and says why", func() bool {
		err := c.Ready()
		return err != nil && strings.Contains(strings.ToLower(err.Error()), "auth")
	})
	_, err = replicated.Connect(t.Context(), config)
	testkit.ErrorHas(t, err, "Authorization", "with revoked credentials")
	if err := store(); err == nil {
		t.Error("something is stored with revoked credentials")
	}

	i.user(file)
	within(t, "the broker is ready", func() bool { return c.Ready() == nil })
	within(t, "it stores", func() bool { return store() == nil })
	testkit.Must(t, l.Close())
}
