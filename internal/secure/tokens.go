package secure

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync/atomic"
)

// minToken is the least length of a token in bytes: 128 bits in hexadecimal are
// 32, and what is much shorter can be guessed.
const minToken = 16

// maxTokens bounds a token file.
const maxTokens = 1000

// tokens are the accepted ones, by digest: comparing digests tells nobody who
// measures the time how much of a guess was right.
type tokens map[[sha256.Size]byte]Role

// role returns the role of a token; false: nobody's.
func (t tokens) role(token string) (Role, bool) {
	role, known := t[sha256.Sum256([]byte(token))]
	return role, known
}

// Tokens are those of a server's file, which is read again when it has changed.
type Tokens struct{ *fresh[tokens] }

// LoadTokens reads the file that the flag names, or returns all its faults.
func LoadTokens(flag, path string) (*Tokens, error) {
	return loadTokens(&atomic.Pointer[slog.Logger]{}, flag, path)
}

func loadTokens(log *atomic.Pointer[slog.Logger], flag, path string) (*Tokens, error) {
	f, err := newFresh(log, func() (tokens, error) {
		t, err := readTokens(path)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", flag, err)
		}
		return t, nil
	}, path)
	if err != nil {
		return nil, err
	}
	return &Tokens{f}, nil
}

// Log says who is told when the file was read again, or could not be.
func (t *Tokens) Log(log *slog.Logger) { t.log.Store(log) }

// Check says why the bearer of an Authorization header may not do what takes the
// role, and whether there is a token that is known; "" if it may.
func (t *Tokens) Check(header string, need Role) (problem string, known bool) {
	if need == Nobody {
		return "", false
	}
	token := Bearer(header)
	if token == "" {
		return noToken, false
	}
	has, known := t.get().role(token)
	switch {
	case !known:
		return badToken, false
	case has < need:
		return fmt.Sprintf("the token's role is %v, and this takes %v", has, need), true
	}
	return "", true
}

// Bearer returns the token of an Authorization header; "" without.
func Bearer(header string) string {
	scheme, token, _ := strings.Cut(header, " ")
	if !strings.EqualFold(scheme, "bearer") {
		return ""
	}
	return strings.TrimSpace(token)
}

// What is wrong with a token.
const (
	noToken  = "a token is needed"
	badToken = "the token is not known"
)

// readTokens reads the tokens that a server accepts: a line for each, a role, a
// space and the token; empty lines and those that begin with # are left out. It
// returns all faults, and repeats no token in them.
func readTokens(path string) (tokens, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	all := tokens{}
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
		switch {
		case !known:
			fault("want a role (read-only, node or admin) and a token")
		case len(fields) != 2:
			fault("%d words, want a role and a token", len(fields))
		case len(fields[1]) < minToken:
			fault("the token has %d bytes, want at least %d", len(fields[1]), minToken)
		case len(all) == maxTokens:
			return nil, errors.Join(append(errs, fmt.Errorf("%s: more than %d tokens", path, maxTokens))...)
		default:
			digest := sha256.Sum256([]byte(fields[1]))
			if _, twice := all[digest]; twice {
				fault("the token is there already")
			}
			all[digest] = role
		}
	}
	if err := lines.Err(); err != nil {
		errs = append(errs, fmt.Errorf("%s: %w", path, err))
	}
	if len(all) == 0 && len(errs) == 0 {
		errs = append(errs, fmt.Errorf("%s: no token", path))
	}
	return all, errors.Join(errs...)
}

// readToken reads the one token that a client shows: the file's first word, or
// with a role before it as in a server's file.
func readToken(path string) (string, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return "", err
	}
	fields := strings.Fields(string(text))
	if len(fields) == 2 {
		if _, known := parseRole(fields[0]); known {
			fields = fields[1:]
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
