package main

import (
	"encoding/json"
	"errors"
	"io"
	"net"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/srtm-io/srtm/admission/server"
	"github.com/srtm-io/srtm/admission/store"
	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/secure"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
)

func stateOf(t *testing.T, web string) (s server.State) {
	t.Helper()
	_, text, _ := strings.Cut(get(t, web+"/debug/state", ""), " ")
	testkit.Must(t, json.Unmarshal([]byte(text), &s))
	return s
}

// A server replicates to another server with TLS and certificates. A client without a certificate, or
// with an expired certificate or a certificate of another authority, cannot write what the follower
// knows, and cannot end the follower's lease and have it saved. The same calls with a valid certificate
// can.
func TestReplicationTakesACertificate(t *testing.T) {
	t.Parallel()
	authority, data := testkit.NewAuthority(t), t.TempDir()
	daemon := func(name string) (web, rpc string) {
		web, rpc = testkit.Address(t), testkit.Address(t)
		host, _, _ := net.SplitHostPort(rpc)
		c := authority.Certificate(name, net.ParseIP(host))
		run(t, "--data-path="+data, "--udp-address=127.0.0.1:0", "--checkpoint=1m", "--http-address="+web,
			"--grpc-address="+rpc, "--tls-cert="+c.CertFile, "--tls-key="+c.KeyFile, "--tls-client-ca="+authority.File,
			"--peer-tls-ca="+authority.File, "--peer-tls-cert="+c.CertFile, "--peer-tls-key="+c.KeyFile)
		testkit.WaitFor(t, name, func() bool {
			_, code, err := localtest.Ask("GET", "http://"+web+"/healthz", "")
			return err == nil && code == 200
		})
		return web, rpc
	}
	owner, _ := daemon("owner")
	testkit.WaitFor(t, "the owner owns all", func() bool { return stateOf(t, owner).Partitions == 4096 })
	_, rpc := daemon("follower")
	dial := func(c secure.ClientConfig) (srtmv1.AdmissionReplicationClient, srtmv1.AdmissionAdminClient) {
		options := testkit.Result(c.Load("")).Must(t)
		conn := testkit.Result(grpc.NewClient(rpc, options...)).Must(t)
		t.Cleanup(func() { conn.Close() })
		return srtmv1.NewAdmissionReplicationClient(conn), srtmv1.NewAdmissionAdminClient(conn)
	}
	as := func(c testkit.Certificate) secure.ClientConfig {
		return secure.ClientConfig{CAFile: authority.File, CertFile: c.CertFile, KeyFile: c.KeyFile}
	}
	peer, admin := dial(as(authority.Certificate("peer")))
	_, err := admin.SetRules(t.Context(), &srtmv1.SetRulesRequest{Rules: []*srtmv1.AdmissionRule{{Key: "k", RefillMilli: 1, Capacity: 10}}})
	testkit.Must(t, err)
	testkit.WaitFor(t, "the follower", func() bool { return stateOf(t, owner).Follower != "" })
	testkit.MustEqual(t, get(t, owner+"/qos?key=k&cost=7", ""), `200 TRUE "default";r=3;t=7000`)
	admitted := clock.Mono()
	testkit.WaitFor(t, "replication", func() bool {
		since := clock.Mono().Sub(admitted) // read before Lag, because the last round began later
		return stateOf(t, owner).Lag < since.Seconds()
	})

	db := testkit.Result(store.Open(t.Context(), filepath.Join(data, "admission.db"))).Must(t)
	defer db.Close()
	members, err := db.Members(t.Context())
	if err != nil || len(members) != 2 {
		t.Fatal(members, err)
	}
	from, to := members[0], members[1]
	if from.Follower != to.Instance || to.Replicate != rpc {
		from, to = to, from
	}
	replicate := func(as srtmv1.AdmissionReplicationClient, key string) error {
		_, err := as.Replicate(t.Context(), &srtmv1.ReplicateRequest{Owner: from.Instance, Follower: to.Instance, Credits: []*srtmv1.AdmissionCredit{
			{Key: key, CreditMilli: 9000, Epoch: 1, AtMs: 1 << 42}, // newer than the owner's
		}})
		return err
	}
	recover := func(as srtmv1.AdmissionReplicationClient) error {
		stream, err := as.Recover(t.Context(), &srtmv1.RecoverRequest{Owner: from.Instance, Follower: to.Instance})
		for err == nil {
			_, err = stream.Recv()
		}
		if errors.Is(err, io.EOF) {
			err = nil
		}
		return err
	}
	saved := func() map[string]int64 {
		credits := testkit.Result(db.Credits(t.Context(), []string{"k", "other"})).Must(t)
		known := map[string]int64{}
		for key, c := range credits {
			known[key] = int64(c.Credits) / 1000
		}
		return known
	}

	for name, c := range map[string]secure.ClientConfig{
		"in clear":                {},
		"without a certificate":   {CAFile: authority.File},
		"of another authority":    as(testkit.NewAuthority(t).Certificate("peer")),
		"that is no longer valid": as(authority.Expired("expired")),
	} {
		unverified, _ := dial(c)
		if err := replicate(unverified, "k"); status.Code(err) != codes.Unavailable {
			t.Errorf("%s: replicate: %v", name, err)
		}
		if err := recover(unverified); status.Code(err) != codes.Unavailable {
			t.Errorf("%s: recover: %v", name, err)
		}
	}
	if credits := saved(); len(credits) > 0 {
		t.Errorf("%v is saved before any check-point", credits)
	}
	// The follower's lease has not ended. Nothing can be replicated to a follower whose lease has ended.
	if err := replicate(peer, "other"); err != nil {
		t.Errorf("a peer: %v", err)
	}
	if err := recover(peer); err != nil {
		t.Errorf("a peer: %v", err)
	}
	if credits := saved(); len(credits) != 2 || credits["k"] != 3 || credits["other"] != 9 {
		t.Errorf("the follower saved %v; the owner has replicated 3 of k, and a peer 9 of other", credits)
	}
	if err := replicate(peer, "k"); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("after the lease has ended: %v", err)
	}
}
