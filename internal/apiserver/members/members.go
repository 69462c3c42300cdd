// Package members makes one cluster of several servers with embedded etcds
// (docs/design/015-several-servers.md): what a data directory knows of its server as a
// member, the tokens with which others join, what they get, and the list of all.
//
// A member's client URL, as etcd calls it, is the URL of its API server: etcd itself
// is served only to the process, on a unix socket.
package members

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"

	"github.com/fairlead/fairlead/internal/kernel/fileio"
)

// PeerName is the DNS name in the certificates with which members know each other. No request
// for a client's certificate may have a DNS name, so no approval makes a member.
const PeerName = "etcd.servers.fairlead.dev"

// PeerLeaf is the file name in pki/, without extension, of the certificate with which the embedded etcds of
// several servers know each other.
const PeerLeaf = "etcd-peer"

// stateFile is in the directory of the embedded etcd, with which it is moved away.
const stateFile = "server.json"

// State is what a data directory knows of its server as a member.
type State struct {
	// Name is that among the servers, and Peer the URL at which etcds of others reach it.
	Name string `json:"name"`
	Peer string `json:"peer"`
	// Removed is set when others have removed this server for good.
	Removed bool `json:"removed,omitempty"`
}

// Load reads the state in dir, that of the embedded etcd. The error is fs.ErrNotExist for a server
// that is the only one.
func Load(dir string) (State, error) {
	var s State
	data, err := os.ReadFile(filepath.Join(dir, stateFile))
	if err != nil {
		return s, err
	}
	if err := json.Unmarshal(data, &s); err != nil {
		return s, fmt.Errorf("%s is damaged: %w", filepath.Join(dir, stateFile), err)
	}
	return s, nil
}

// Save writes the state into dir, which it makes.
func (s State) Save(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	data, err := json.Marshal(s)
	if err != nil {
		return err
	}
	return fileio.Replace(filepath.Join(dir, stateFile), append(data, '\n'), 0o600)
}

// HasStore reports whether dir has the log of an etcd, which then knows its members itself.
func HasStore(dir string) (bool, error) {
	_, err := os.Stat(filepath.Join(dir, "member", "wal"))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}

var nameForm = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$`)

// CheckName returns what is wrong with the name of a server.
func CheckName(name string) error {
	if !nameForm.MatchString(name) {
		return fmt.Errorf("%q is not the name of a server: want up to 63 letters, digits, dots and dashes", name)
	}
	return nil
}

// Member is a server of the cluster.
type Member struct {
	// Name is empty for one that has not started yet, or the address of Peer in a list.
	Name string `json:"name"`
	ID   string `json:"id"`
	Peer string `json:"peer"`
	// Server is the URL of the API server.
	Server string `json:"server,omitempty"`
	// Role is learner, voter or leader.
	Role string `json:"role"`
	// Status is what the server reports about itself, nil if it does not answer.
	Status *Status `json:"status,omitempty"`
	// Lag is how many writes of the leader the server has not applied, if both have answered.
	Lag *int64 `json:"lag,omitempty"`
}

// Roles of a Member.
const (
	RoleLearner = "learner"
	RoleVoter   = "voter"
	RoleLeader  = "leader"
)

// Status is what a server reports about its etcd.
type Status struct {
	ID string `json:"id"`
	// Leader is the ID of the leader that the server knows, empty if it knows none.
	Leader string `json:"leader,omitempty"`
	// SizeBytes is the size of the store, and Index the last write that was applied.
	SizeBytes int64  `json:"sizeBytes"`
	Index     uint64 `json:"index"`
}

// Local returns a client of the etcd at endpoint, that of this machine.
func Local(endpoint string, opts ...grpc.DialOption) (*clientv3.Client, error) {
	return clientv3.New(clientv3.Config{
		Endpoints: []string{endpoint}, DialTimeout: 5 * time.Second, DialOptions: opts, Logger: zap.NewNop(),
	})
}

// Self returns the status of the etcd behind c.
func Self(ctx context.Context, c *clientv3.Client) (*Status, error) {
	r, err := c.Status(ctx, c.Endpoints()[0])
	if err != nil {
		return nil, err
	}
	s := &Status{ID: idText(r.Header.MemberId), SizeBytes: r.DbSize, Index: r.RaftAppliedIndex}
	if r.Leader != 0 {
		s.Leader = idText(r.Leader)
	}
	return s, nil
}

// List returns the members that the etcd behind c knows, by name; it needs no quorum. Its own has a
// Status.
func List(ctx context.Context, c *clientv3.Client) ([]Member, error) {
	r, err := c.MemberList(ctx, clientv3.WithSerializable())
	if err != nil {
		return nil, err
	}
	self, err := Self(ctx, c)
	if err != nil {
		return nil, err
	}
	var out []Member
	for _, m := range r.Members {
		out = append(out, memberOf(m, self))
	}
	slices.SortFunc(out, func(a, b Member) int { return strings.Compare(a.Name, b.Name) })
	return out, nil
}

func memberOf(m *etcdserverpb.Member, self *Status) Member {
	out := Member{Name: m.Name, ID: idText(m.ID), Peer: first(m.PeerURLs), Server: first(m.ClientURLs), Role: RoleVoter}
	switch {
	case m.IsLearner:
		out.Role = RoleLearner
	case out.ID == self.Leader:
		out.Role = RoleLeader
	}
	if out.Name == "" {
		out.Name = host(out.Peer)
	}
	if !strings.HasPrefix(out.Server, "https://") {
		out.Server = "" // of a server that had no others
	}
	if out.ID == self.ID {
		out.Status = self
	}
	return out
}

// SetLags fills in how far members are behind the leader.
func SetLags(list []Member) {
	i := slices.IndexFunc(list, func(m Member) bool { return m.Role == RoleLeader && m.Status != nil })
	if i < 0 {
		return
	}
	for k := range list {
		if s := list[k].Status; s != nil {
			lag := max(0, int64(list[i].Status.Index)-int64(s.Index)) //nolint:gosec // writes are fewer than 1<<63
			list[k].Lag = &lag
		}
	}
}

func idText(id uint64) string { return strconv.FormatUint(id, 16) }

func first(urls []string) string {
	if len(urls) == 0 {
		return ""
	}
	return urls[0]
}

// host returns the host and port of a URL.
func host(text string) string {
	if u, err := url.Parse(text); err == nil && u.Host != "" {
		return u.Host
	}
	return text
}
