package store

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"go.etcd.io/etcd/client/pkg/v3/transport"
	"go.etcd.io/etcd/server/v3/embed"
	"go.etcd.io/etcd/server/v3/etcdserver"
	"go.etcd.io/etcd/server/v3/etcdserver/api/membership"

	"github.com/fairlead/fairlead/internal/apiserver/members"
	"github.com/fairlead/fairlead/internal/apiserver/pki"
)

const (
	// peerTick and peerElection are etcd's times in ms for members on one network, its own defaults:
	// a dead leader is replaced after one to two elections.
	peerTick, peerElection = 100, 1000
	// peerCatchUp is how many writes the log keeps for members that were away; others get a snapshot.
	peerCatchUp = 5000
	// peerReport is the time between two messages about a start that waits for other servers,
	// peerFirst that until the first, and peerLook that between two looks.
	peerReport = 10 * time.Second
	peerFirst  = 2 * time.Second
	peerLook   = 100 * time.Millisecond
	// peerUpdate bounds the change of this member's address.
	peerUpdate = 30 * time.Second
)

// ErrRemoved is that of a server that others have removed from the cluster. It cannot run again with
// what it has.
var ErrRemoved = errors.New("this server was removed from its cluster")

// Peering is how the embedded etcd of one of several servers reaches the others.
type Peering struct {
	members.State
	Dir    string // of the embedded etcd
	server string // the URL of the API server, for others
	// Authorities returns the authorities of the cluster; set before the etcd starts.
	Authorities func() *pki.Bundle
	// Cluster is all members for an etcd that has no store yet, or empty for the first member.
	Cluster string
	log     *slog.Logger

	// trusted are the authorities by pki.Hash that the etcd has read at its start.
	trusted atomic.Pointer[[]string]
}

// IsMember reports whether a data directory is that of one of several servers with embedded etcds.
func IsMember(path string) bool {
	_, err := members.Load((&Dir{Path: path}).File("etcd"))
	return err == nil
}

// PeeringOptions describe a server that may be one of several with embedded etcds.
type PeeringOptions struct {
	// DataDir is its data directory, Server the URL of its API server for others, Name its name where it has none yet.
	DataDir, Server, Name string
	// First makes it the first member of a new cluster if it is not a member yet.
	First bool
	// External reports that an external etcd was asked for.
	External bool
	// Address and Port are where etcds of other servers reach this one.
	Address netip.Addr
	Port    uint16
	Log     *slog.Logger
}

// LoadPeering returns how this server is one of several, nil if it is the only one.
func LoadPeering(o PeeringOptions) (*Peering, error) {
	p := &Peering{Dir: filepath.Join(o.DataDir, "etcd"), server: o.Server, log: o.Log}
	var err error
	p.State, err = members.Load(p.Dir)
	switch {
	case errors.Is(err, fs.ErrNotExist) && !o.First:
		return nil, nil
	case errors.Is(err, fs.ErrNotExist):
		if p.Name, err = ServerName(o.Name); err != nil {
			return nil, err
		}
	case err != nil:
		return nil, err
	case p.Removed:
		return nil, RemovedError(p.Name, p.Dir)
	case o.Name != "" && o.Name != p.Name:
		return nil, fmt.Errorf("this server's name is %s: leave out --server-name %s, or join again with an empty data directory",
			p.Name, o.Name)
	}
	if o.External {
		return nil, errors.New("--etcd-servers and an embedded etcd with other members exclude each other: leave out --etcd-servers, " +
			"--cluster-init and --join, or choose another --data-dir")
	}
	if p.Peer, err = PeerURL(o.Address, o.Port); err != nil {
		return nil, err
	}
	return p, nil
}

// PeerURL is where etcds of other servers reach this one.
func PeerURL(a netip.Addr, port uint16) (string, error) {
	if !a.IsValid() {
		return "", errors.New("several servers need an address of this one that others reach: " +
			"pass --bind-address 127.0.0.1,ADDRESS, or --advertise-address ADDRESS")
	}
	return "https://" + netip.AddrPortFrom(a, port).String(), nil
}

// ServerName returns the name of a server among several: name, or the host's name without one.
func ServerName(name string) (string, error) {
	if name == "" {
		var err error
		if name, err = os.Hostname(); err != nil {
			return "", err
		}
	}
	return name, members.CheckName(name)
}

// configure makes an etcd reach its peers, and only its peers reach it.
func (p *Peering) configure(c *embed.Config) error {
	peer, err := url.Parse(p.Peer)
	if err != nil {
		return err
	}
	server, err := url.Parse(p.server)
	if err != nil {
		return err
	}
	c.Name = p.Name
	c.ListenPeerUrls, c.AdvertisePeerUrls = []url.URL{*peer}, []url.URL{*peer}
	c.AdvertiseClientUrls = []url.URL{*server}
	c.InitialCluster = c.InitialClusterFromName(c.Name)
	if p.Cluster != "" {
		c.InitialCluster, c.ClusterState = p.Cluster, embed.ClusterStateFlagExisting
	}
	c.TickMs, c.ElectionMs = peerTick, peerElection
	c.SnapshotCatchUpEntries = peerCatchUp
	file := func(name string) string { return filepath.Join(filepath.Dir(p.Dir), "pki", name) }
	cert := file(members.PeerLeaf + ".crt")
	trusted := p.Authorities().Hashes()
	p.trusted.Store(&trusted)
	c.PeerTLSInfo = transport.TLSInfo{
		CertFile: cert, KeyFile: pki.KeyFile(cert), TrustedCAFile: file("ca.crt"), ClientCertAuth: true,
		ServerName: members.PeerName, AllowedHostnames: []string{members.PeerName},
		// Only servers have the name; a machine may have several addresses.
		SkipClientSANVerify: true,
	}
	return nil
}

// TrustedAtStart returns the authorities, by pki.Hash, that the etcd has read at its start.
func (p *Peering) TrustedAtStart() []string { return *p.trusted.Load() }

// newClusterToken makes the members of a cluster differ from the members of any other, also of an earlier one with
// the same addresses and authority, whose members may still run.
func newClusterToken() string { return "fairlead-" + rand.Text() }

// RemovedError is the error of a server that others have removed. dir is that of its etcd.
func RemovedError(name, dir string) error {
	return fmt.Errorf("%w under the name %s, and its store is of no use: to have it join again, empty %s (keep backups/) and start it "+
		"with --join and a new token of 'fairlead token create --server'", ErrRemoved, name, filepath.Dir(dir))
}

// await waits until an etcd that has started counts, however long the others let it wait.
func (p *Peering) await(ctx context.Context, e *embed.Etcd, f etcdFailures) error {
	tick := time.NewTicker(peerLook)
	defer tick.Stop()
	ready, report := false, time.Now().Add(peerFirst)
	for {
		select {
		case <-e.Server.ReadyNotify():
			ready = true
		default:
		}
		if ready && !e.Server.IsLearner() {
			return p.update(ctx, e.Server)
		}
		select {
		case err := <-e.Err():
			return f.explain(err)
		case err := <-f.ch:
			f.report(err) // for stop
			return f.explain(err)
		case <-e.Server.StopNotify():
			return p.ended(f)
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
		if time.Now().Before(report) {
			continue
		}
		report = time.Now().Add(peerReport)
		if ready {
			p.log.Info("this server is catching up", "applied", e.Server.AppliedIndex(), "of", e.Server.CommittedIndex())
			continue
		}
		p.log.Warn("waiting for other servers: more than half must be up", "servers", p.names(e.Server))
	}
}

// update publishes the address of this member, which was the only one before or has moved.
func (p *Peering) update(ctx context.Context, s *etcdserver.EtcdServer) error {
	if m := s.Cluster().Member(s.MemberID()); m != nil && !slices.Equal(m.PeerURLs, []string{p.Peer}) {
		ctx, cancel := context.WithTimeout(ctx, peerUpdate)
		defer cancel()
		_, err := s.UpdateMember(ctx, membership.Member{ID: m.ID, RaftAttributes: membership.RaftAttributes{PeerURLs: []string{p.Peer}}})
		if err != nil {
			return fmt.Errorf("cannot change this server's address for others to %s: %w", p.Peer, err)
		}
		p.log.Info("this server is reached by others at a new address", "peer", p.Peer)
	}
	return p.Save(p.Dir)
}

// ended is the error of an etcd that has ended by itself.
func (p *Peering) ended(f etcdFailures) error {
	select {
	case err := <-f.ch:
		f.report(err) // for stop
		return f.explain(err)
	default:
	}
	p.Removed = true
	return errors.Join(RemovedError(p.Name, p.Dir), p.Save(p.Dir))
}

// servers are the addresses of the API servers of all members. Members that have not started have the
// addresses of their etcds.
func (p *Peering) servers(s *etcdserver.EtcdServer) (out []string) {
	for _, m := range s.Cluster().Members() {
		if urls := slices.Concat(m.ClientURLs, m.PeerURLs); len(urls) > 0 {
			out = append(out, strings.TrimPrefix(urls[0], "https://"))
		}
	}
	slices.Sort(out)
	return out
}

// names are the names of all members, or their addresses.
func (p *Peering) names(s *etcdserver.EtcdServer) (out []string) {
	for _, m := range s.Cluster().Members() {
		if m.Name != "" {
			out = append(out, m.Name)
		} else {
			out = append(out, m.PeerURLs...)
		}
	}
	slices.Sort(out)
	return out
}

// checkLeader is the check of /readyz for the quorum.
func (p *Peering) checkLeader(s *etcdserver.EtcdServer) error {
	if s.Leader() != 0 {
		return nil
	}
	names := p.names(s)
	return fmt.Errorf("no leader: fewer than %d of the %d servers (%v) reach each other; see 'fairlead server members'",
		len(names)/2+1, len(names), names)
}

// LocalMembers returns the members that the embedded etcd of a data directory knows, whose server
// runs on this machine. It needs no quorum.
func LocalMembers(ctx context.Context, dataDir string) ([]members.Member, error) {
	dir := filepath.Join(dataDir, "etcd")
	socket, release, err := socketPath(dir)
	if err != nil {
		return nil, err
	}
	defer release()
	c, err := members.Local("unix://" + socket)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	ctx, cancel := context.WithTimeout(ctx, etcdDialTimeout)
	defer cancel()
	list, err := members.List(ctx, c)
	if err != nil {
		return nil, fmt.Errorf("the etcd in %s does not answer: is its server up, and are you its user? %w", dir, err)
	}
	return list, nil
}
