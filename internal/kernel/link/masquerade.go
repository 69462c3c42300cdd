package link

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// masqueradeTable is the one nft table of this package.
const masqueradeTable = "fairlead-pods"

// Masquerade gives packets of pods that leave the cluster the node's address.
// pods are the ranges of this node's pods, cluster those of all pods: packets to
// them keep their source. The table is replaced in one transaction.
func Masquerade(pods, cluster []netip.Prefix) error {
	c, err := nftables.New()
	if err != nil {
		return fmt.Errorf("talk to nf_tables: %w", err)
	}
	t := &nftables.Table{Name: masqueradeTable, Family: nftables.TableFamilyINet}
	c.AddTable(t) // so that deleting cannot fail
	c.DelTable(t)
	c.AddTable(t)
	chain := c.AddChain(&nftables.Chain{
		Name: "postrouting", Table: t, Type: nftables.ChainTypeNAT,
		Hooknum: nftables.ChainHookPostrouting, Priority: nftables.ChainPriorityNATSource,
	})
	for _, p := range cluster {
		c.AddRule(&nftables.Rule{Table: t, Chain: chain, Exprs: append(match(p, false), &expr.Verdict{Kind: expr.VerdictReturn})})
	}
	for _, p := range pods {
		c.AddRule(&nftables.Rule{Table: t, Chain: chain, Exprs: append(match(p, true), &expr.Masq{})})
	}
	if err := c.Flush(); err != nil {
		return fmt.Errorf("write nft table inet %s: %w", masqueradeTable, err)
	}
	return nil
}

// match are the expressions for "source (or destination) address in p".
func match(p netip.Prefix, source bool) []expr.Any {
	p = p.Masked()
	family, offset, size := byte(unix.NFPROTO_IPV4), uint32(16), uint32(4)
	if p.Addr().Is6() {
		family, offset, size = unix.NFPROTO_IPV6, 24, 16
	}
	if source {
		offset -= size
	}
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{family}},
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: size},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: size, Mask: net.CIDRMask(p.Bits(), int(size)*8), Xor: make([]byte, size)},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: p.Addr().AsSlice()},
	}
}

// Unmasquerade removes the table. One that is not there, or a kernel without
// nf_tables, is no error.
func Unmasquerade() error {
	c, err := nftables.New()
	if err != nil {
		return fmt.Errorf("talk to nf_tables: %w", err)
	}
	c.DelTable(&nftables.Table{Name: masqueradeTable, Family: nftables.TableFamilyINet})
	err = c.Flush()
	if err == nil || errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EAFNOSUPPORT) || errors.Is(err, unix.EOPNOTSUPP) {
		return nil
	}
	return fmt.Errorf("remove nft table inet %s: %w", masqueradeTable, err)
}
