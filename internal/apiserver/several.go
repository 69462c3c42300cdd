package apiserver

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"k8s.io/apiserver/pkg/server/healthz"

	"github.com/fairlead/fairlead/internal/apiserver/accounts"
	"github.com/fairlead/fairlead/internal/apiserver/join"
	"github.com/fairlead/fairlead/internal/apiserver/listen"
	"github.com/fairlead/fairlead/internal/apiserver/members"
	"github.com/fairlead/fairlead/internal/apiserver/store"
	"github.com/fairlead/fairlead/internal/kernel/fileio"
)

// JoinOptions lead a server to the cluster that it joins.
type JoinOptions struct {
	// Server is the URL of a server of the cluster; empty means not to join.
	Server string
	// Token is the text of the token of a server.
	Token string
}

// sharedFiles are the files of pki/ that all servers of a cluster have alike. The others are
// made with them.
func sharedFiles() []string {
	return append([]string{"ca.crt", "ca.key", "ca-cross.crt"}, accounts.Files()...)
}

// Join prepares the data directory of a server that joins a cluster: it fetches the keys that all
// servers have alike. It does nothing in the directory of a server that has joined. Run does the rest.
func Join(ctx context.Context, o Options) error {
	if err := o.complete(); err != nil {
		return err
	}
	dir, err := store.OpenDir(o.DataDir)
	if err != nil {
		return err
	}
	defer dir.Close()
	member, err := o.isMember(dir)
	if err != nil || member {
		return err
	}
	token, err := join.ParseServer(o.Join.Token)
	if err != nil {
		return err
	}
	j, err := o.joiner(token)
	if err != nil {
		return err
	}
	settings, err := o.settings()
	if err != nil {
		return err
	}
	files, err := j.Bundle(ctx, settings)
	if err != nil {
		return fmt.Errorf("cannot join the cluster of %s: %w", o.Join.Server, err)
	}
	if err := os.MkdirAll(dir.File("pki"), 0o700); err != nil {
		return err
	}
	for _, name := range sharedFiles() {
		if data, ok := files[name]; ok {
			if err := fileio.Replace(dir.File(filepath.Join("pki", name)), data, 0o600); err != nil {
				return err
			}
		}
	}
	o.Log.Info("got the keys of the cluster", "server", o.Join.Server)
	return members.State{Name: j.Name, Peer: j.Peer}.Save(dir.File("etcd"))
}

// isMember reports whether the server of dir has joined its cluster. The error is that of a directory
// that has something else.
func (o *Options) isMember(dir *store.Dir) (bool, error) {
	has, err := members.HasStore(dir.File("etcd"))
	if err != nil {
		return false, err
	}
	state, err := members.Load(dir.File("etcd"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return false, err
	}
	if state.Removed {
		return false, store.RemovedError(state.Name, dir.File("etcd"))
	}
	elsewhere := fmt.Sprintf("to join, empty %s, or choose another directory with --data-dir; without --join it goes on as it was", dir.Path)
	if has && err != nil {
		return false, fmt.Errorf("the data directory %s has the objects of another server: %s", dir.Path, elsewhere)
	}
	hash, err := authorityHash(dir.File("pki/ca.crt"))
	if err != nil {
		return false, err
	}
	token, err := join.ParseServer(o.Join.Token)
	// After a rotation of the authority the token with which a member has joined has an earlier hash.
	_, rotated := os.Stat(dir.File("pki/ca-cross.crt"))
	if known := err == nil && hash != "" && errors.Is(rotated, fs.ErrNotExist); known && hash != token.Hash {
		return false, fmt.Errorf("the data directory %s is that of a server of another cluster than the token's: %s", dir.Path, elsewhere)
	}
	return has, nil
}

// authorityHash returns the hash of the authority in file, "" if there is none.
func authorityHash(file string) (string, error) {
	data, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	block, _ := pem.Decode(data)
	if block == nil {
		return "", fmt.Errorf("%s holds no PEM certificate", file)
	}
	sum := sha256.Sum256(block.Bytes)
	return hex.EncodeToString(sum[:]), nil
}

// joiner is this server for the one that it joins.
func (o *Options) joiner(token join.Token) (members.Joiner, error) {
	j := members.Joiner{Server: o.Join.Server, Token: token, Log: o.Log}
	var err error
	if j.Name, err = store.ServerName(o.ServerName); err != nil {
		return j, err
	}
	a := o.AdvertiseAddress
	if !a.IsValid() {
		a = listen.ChooseAdvertise(o.BindAddresses)
	}
	j.Peer, err = store.PeerURL(a, o.EtcdPeerPort)
	return j, err
}

// settings are what servers of one cluster must have alike.
func (o *Options) settings() (members.Settings, error) {
	published := join.Cluster{ServiceCIDRs: o.ServiceCIDRs, PodCIDRs: o.PodCIDRs, Domains: o.Domains}.Data()
	s := members.Settings{
		join.KeyServiceCIDRs:         published[join.KeyServiceCIDRs],
		join.KeyPodCIDRs:             published[join.KeyPodCIDRs],
		join.KeyDomains:              published[join.KeyDomains],
		"service-node-port-range":    fmt.Sprintf("%d-%d", o.NodePorts.First, o.NodePorts.Last),
		"service-account-issuer":     o.Auth.ServiceAccountIssuer,
		"api-audiences":              strings.Join(o.Auth.APIAudiences, ","),
		"pod-security-default":       o.PodSecurity,
		"strict-load-balancers":      strconv.FormatBool(o.StrictLoadBalancers),
		"allow-service-external-ips": strconv.FormatBool(o.AllowServiceExternalIPs),
		"encryption-provider-config": "",
	}
	if file := o.Auth.EncryptionConfig; file != "" {
		data, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		sum := sha256.Sum256(data)
		s["encryption-provider-config"] = "a file with the SHA-256 " + hex.EncodeToString(sum[:])
	}
	return s, nil
}

// becomeMember has this server added to the cluster that it joins, unless it is a member already.
func (s *Server) becomeMember(ctx context.Context) error {
	p := s.peering
	has, err := members.HasStore(p.Dir)
	if err != nil || has {
		return err
	}
	switch {
	case s.opts.Join.Server != "":
		token, err := join.ParseServer(s.opts.Join.Token)
		if err != nil {
			return err
		}
		j := members.Joiner{Server: s.opts.Join.Server, Token: token, Name: p.Name, Peer: p.Peer, Log: s.log}
		if p.Cluster, err = j.Add(ctx); err != nil {
			return fmt.Errorf("cannot join the cluster of %s: %w", s.opts.Join.Server, err)
		}
		s.log.Info("joining the cluster; this server counts when it has caught up", "server", s.opts.Join.Server, "name", p.Name)
	case !s.opts.ClusterInit:
		return fmt.Errorf("the server in %s has not finished joining its cluster: start it with --join and --token-file", s.dir.Path)
	}
	return p.Save(p.Dir)
}

// configureMembers adds what other servers and administrators ask of one of several servers.
func (a *assembly) configureMembers(context.Context) error {
	if a.peering == nil {
		return nil
	}
	quorum := healthz.NamedCheck("etcd-quorum", func(*http.Request) error { return a.store.CheckLeader() })
	a.config.ReadyzChecks = append(a.config.ReadyzChecks, quorum)
	settings, err := a.opts.settings()
	if err != nil {
		return err
	}
	a.members, err = members.New(members.Options{
		Endpoint: a.store.Endpoints[0], Dial: a.store.Dial, Server: a.store.EtcdServer, Authorities: a.creds.PKI.Bundle,
		Authorizer: a.guard.Authorizer, Settings: settings, Files: a.sharedFiles,
		Audit: auditJoining(a.config), Leave: a.removeServer, Log: a.log,
	})
	return err
}

// removeServer removes a server that leaves the cluster, by its URL, from the endpoints of default/kubernetes.
func (a *assembly) removeServer(ctx context.Context, server string) error {
	at, err := netip.ParseAddrPort(strings.TrimPrefix(server, "https://"))
	if err != nil {
		return err
	}
	return a.keeper.remove(ctx, at)
}

// sharedFiles reads the files of pki/ that all servers have alike.
func (s *Server) sharedFiles() (map[string][]byte, error) {
	out := map[string][]byte{}
	for _, name := range sharedFiles() {
		data, err := os.ReadFile(s.dir.File(filepath.Join("pki", name)))
		if errors.Is(err, fs.ErrNotExist) && name != "ca.crt" {
			continue
		}
		if err != nil {
			return nil, err
		}
		out[name] = data
	}
	return out, nil
}
