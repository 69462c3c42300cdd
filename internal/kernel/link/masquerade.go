package link

import (
	"errors"
	"net/netip"

	"github.com/fairlead/fairlead/internal/kernel/nftables"
	"github.com/fairlead/fairlead/internal/svc"
)

// masqueradeTable is the one nft table of this package.
var masqueradeTable = nftables.Table{Family: nftables.Inet, Name: "fairlead-pods"}

// Masquerade gives packets of pods that leave the cluster the node's address.
type Masquerade struct{ conn *nftables.Conn }

// NewMasquerade returns a Masquerade in the network namespace of the calling thread,
// of which it changes nothing yet. changed is called, as that of
// nftables.Conn.Watch, when another program changes what Set has written.
func NewMasquerade(changed func()) (*Masquerade, error) {
	c, err := nftables.Dial()
	if err != nil {
		return nil, err
	}
	if err := c.Watch(masqueradeTable.Name, changed); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return &Masquerade{c}, nil
}

// Close ends the notifications; what Set has written stays.
func (m *Masquerade) Close() error { return m.conn.Close() }

// Set writes the rules. pods are the ranges of this node's pods, cluster the ranges of
// all pods: packets to them keep their source. The table is replaced in one
// transaction. The error is a *nftables.UnsupportedError where the kernel cannot have it.
func (m *Masquerade) Set(pods, cluster []netip.Prefix) error {
	b := nftables.NewBatch()
	b.Tag(nftables.InetTables)
	b.ReplaceTable(masqueradeTable, "masquerades what pods send out of the cluster")
	addMasquerade(b, masqueradeTable, pods, cluster)
	return m.conn.CommitTable(masqueradeTable, b)
}

// ProbeMasquerade returns why Set cannot work here, or nil. It asks the kernel in a transaction that
// takes back what it makes.
func ProbeMasquerade() error {
	c, err := nftables.Dial()
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }()
	pods := []netip.Prefix{netip.PrefixFrom(netip.IPv4Unspecified(), 8)}
	if HasIPv6() {
		pods = append(pods, netip.PrefixFrom(netip.IPv6Unspecified(), 8))
	}
	t := nftables.Table{Family: nftables.Inet, Name: masqueradeTable.Name + "-probe"}
	b := nftables.NewBatch()
	b.Tag(nftables.InetTables)
	b.AddTable(t, "")
	addMasquerade(b, t, pods, pods)
	b.Tag(nil)
	b.DelTable(t)
	return c.CommitTable(t, b)
}

// addMasquerade adds what table t has.
func addMasquerade(b *nftables.Batch, t nftables.Table, pods, cluster []netip.Prefix) {
	const chain = "postrouting"
	b.Tag("a chain of type nat (CONFIG_NFT_NAT; Linux 5.2)")
	b.AddChain(t, nftables.Chain{
		Name: chain, Hook: &nftables.Hook{Type: "nat", Number: nftables.Postrouting, Priority: nftables.PrioritySrcNAT},
	})
	b.Tag("the match of a range")
	for _, p := range cluster {
		h := nftables.HeaderOf(svc.FamilyOf(p.Addr()))
		b.AddRule(t, chain, nftables.NewRule(h.InetPrefix(h.Destination, p).Return(), "%s daddr %s return", h.Word, p))
	}
	b.Tag("masquerade (CONFIG_NFT_MASQ)")
	for _, p := range pods {
		h := nftables.HeaderOf(svc.FamilyOf(p.Addr()))
		b.AddRule(t, chain, nftables.NewRule(h.InetPrefix(h.Source, p).Masquerade(), "%s saddr %s masquerade", h.Word, p))
	}
}

// Unmasquerade removes the table. It is no error if there is none, or no
// nf_tables in the kernel.
func Unmasquerade() error { return nftables.RemoveTable(masqueradeTable) }
