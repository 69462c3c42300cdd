package members

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/fairlead/fairlead/internal/apiserver/join"
	"github.com/fairlead/fairlead/internal/apiserver/pki"
)

// tokenPrefix is where etcd keeps the tokens of servers: beside the objects of the API, so that no
// right to Secrets makes or shows one.
const tokenPrefix = "/fairlead/server-tokens/"

// DefaultTokenLife is how long the token of a server is valid unless another end is asked for.
const DefaultTokenLife = time.Hour

// Token is what may be shown of the token of a server.
type Token struct {
	ID          string    `json:"id"`
	End         time.Time `json:"end"`
	Description string    `json:"description,omitempty"`
	// Reusable tokens are for any number of servers; others are deleted when one has joined.
	Reusable bool `json:"reusable,omitempty"`
	// UsedBy is the name of the server that has used a token that is not reusable.
	UsedBy string `json:"usedBy,omitempty"`
}

// stored is the value of a token's key. Only the hash of the secret is kept.
type stored struct {
	Token
	Hash string `json:"hash"`
}

// tokens are the tokens of servers in etcd.
type tokens struct {
	etcd        *clientv3.Client
	authorities func() *pki.Bundle
	now         func() time.Time
}

// tokenError is that of a token that is not accepted.
type tokenError struct{ why string }

func (e *tokenError) Error() string {
	return "the token " + e.why + ": make one with 'fairlead token create --server'"
}

// errToken does not reveal the reason.
var errToken = &tokenError{"is not valid (it has expired, was used or revoked, or never was one)"}

// create makes a token.
func (t tokens) create(ctx context.Context, want Token) (join.Token, error) {
	if err := t.sweep(ctx); err != nil {
		return join.Token{}, err
	}
	made := join.NewServer(t.authorities().Signer().Cert)
	want.ID, want.UsedBy = made.ID, ""
	return made, t.put(ctx, stored{want, secretHash(made.Secret)}, 0)
}

// put writes a token, if its key was not written since revision.
func (t tokens) put(ctx context.Context, s stored, revision int64) error {
	data, err := json.Marshal(s)
	if err != nil {
		return err
	}
	key := tokenPrefix + s.ID
	r, err := t.etcd.Txn(ctx).If(clientv3.Compare(clientv3.ModRevision(key), "=", revision)).Then(clientv3.OpPut(key, string(data))).Commit()
	if err == nil && !r.Succeeded {
		err = errors.New("another server has changed the token; try again")
	}
	return err
}

// known returns nil if text is a valid token, whoever has used it.
func (t tokens) known(ctx context.Context, text string) error {
	_, _, err := t.find(ctx, text)
	return err
}

// find returns a valid token, and the revision in which it was written.
func (t tokens) find(ctx context.Context, text string) (s stored, revision int64, err error) {
	given, err := join.ParseServer(text)
	if err != nil || !t.authorities().Trusts(given.Hash) {
		return s, 0, errToken
	}
	r, err := t.etcd.Get(ctx, tokenPrefix+given.ID)
	if err != nil {
		return s, 0, err
	}
	if len(r.Kvs) == 0 || json.Unmarshal(r.Kvs[0].Value, &s) != nil ||
		subtle.ConstantTimeCompare([]byte(s.Hash), []byte(secretHash(given.Secret))) != 1 || !t.now().Before(s.End) {
		return stored{}, 0, errToken
	}
	return s, r.Kvs[0].ModRevision, nil
}

// use returns nil if text is a valid token, which the server of that name has from now on, unless
// the token is reusable.
func (t tokens) use(ctx context.Context, text, name string) error {
	s, revision, err := t.find(ctx, text)
	switch {
	case err != nil:
		return err
	case s.Reusable || s.UsedBy == name:
		return nil
	case s.UsedBy != "":
		return &tokenError{"was used by the server " + s.UsedBy + " already"}
	}
	s.UsedBy = name
	return t.put(ctx, s, revision)
}

// list returns all tokens.
func (t tokens) list(ctx context.Context) ([]Token, error) {
	r, err := t.etcd.Get(ctx, tokenPrefix, clientv3.WithPrefix())
	if err != nil {
		return nil, err
	}
	out := []Token{}
	for _, kv := range r.Kvs {
		var s stored
		if err := json.Unmarshal(kv.Value, &s); err != nil {
			return nil, fmt.Errorf("the token %s is damaged: %w", strings.TrimPrefix(string(kv.Key), tokenPrefix), err)
		}
		out = append(out, s.Token)
	}
	return out, nil
}

// revoke deletes a token and reports whether there was one.
func (t tokens) revoke(ctx context.Context, id string) (bool, error) {
	r, err := t.etcd.Delete(ctx, tokenPrefix+id)
	return err == nil && r.Deleted > 0, err
}

// sweep deletes the tokens that have ended.
func (t tokens) sweep(ctx context.Context) error {
	return t.deleteIf(ctx, func(x Token) bool { return !t.now().Before(x.End) })
}

// joined deletes the token that the server of that name has used.
func (t tokens) joined(ctx context.Context, name string) error {
	return t.deleteIf(ctx, func(x Token) bool { return x.UsedBy == name })
}

func (t tokens) deleteIf(ctx context.Context, drop func(Token) bool) error {
	all, err := t.list(ctx)
	for _, x := range all {
		if drop(x) {
			_, bad := t.revoke(ctx, x.ID)
			err = errors.Join(err, bad)
		}
	}
	return err
}

func secretHash(secret string) string {
	sum := sha256.Sum256([]byte(secret))
	return hex.EncodeToString(sum[:])
}
