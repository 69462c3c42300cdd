package nftables

import (
	"bytes"
	"encoding/binary"
	"hash/fnv"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/kernel/netlink"
)

// Attributes of nf_tables.h that x/sys/unix does not name.
const (
	tableUserdata = 6  // NFTA_TABLE_USERDATA
	chainUserdata = 12 // NFTA_CHAIN_USERDATA
)

// Types of entries in user data (libnftnl's udata.h), by which nft(8) finds
// comments and byte orders. Those it does not know it skips.
const (
	udComment       = 0 // of a table, chain, rule or element
	udKeyOrder      = 0 // of a set
	udDataOrder     = 1
	udSetComment    = 7
	udText          = 0xf1 // ours: Rule.Text
	udHash          = 0xf2 // ours: Rule.Hash
	maxText         = 230  // user data has 256 bytes at most
	orderHost       = 1
	orderBig        = 2
	setFlagMap      = unix.NFT_SET_MAP
	setFlagDynamic  = 0x20 | unix.NFT_SET_TIMEOUT // NFT_SET_EVAL
	setFlagInterval = unix.NFT_SET_INTERVAL

	elemIntervalEnd = unix.NFT_SET_ELEM_INTERVAL_END
)

// Batch collects the messages of one transaction, in the order the kernel will
// work on them.
type Batch struct {
	enc  netlink.Encoder
	tags []any
	tag  any

	// The element message that is still open.
	open       elemOp
	list       int
	closeEvery int
}

type elemOp struct {
	typ   uint16
	table Table
	set   string
}

// NewBatch returns an empty transaction.
func NewBatch() *Batch {
	b := &Batch{closeEvery: 60 << 10}
	b.enc.Begin(unix.NFNL_MSG_BATCH_BEGIN, 0, unix.AF_UNSPEC, unix.NFNL_SUBSYS_NFTABLES)
	b.enc.End()
	b.tags = append(b.tags, nil)
	return b
}

// Tag makes v the cause of the messages that follow; a Refusal names it. It
// ends the sharing of a message by elements, so a tag for each of very many
// elements has a price.
func (b *Batch) Tag(v any) {
	b.endElems()
	b.tag = v
}

// Empty reports whether the transaction has no message yet.
func (b *Batch) Empty() bool { return len(b.tags) == 1 && b.open.typ == 0 }

// Size is the number of bytes of the transaction so far.
func (b *Batch) Size() int { return len(b.enc.Buf) }

// Mentions reports whether the text, such as a comment, is part of the
// transaction.
func (b *Batch) Mentions(text string) bool { return bytes.Contains(b.enc.Buf, []byte(text)) }

func (b *Batch) begin(typ uint16, flags uint16, f Family) {
	b.endElems()
	b.enc.Begin(unix.NFNL_SUBSYS_NFTABLES<<8|typ, flags, uint8(f), 0)
	b.tags = append(b.tags, b.tag)
}

// AddTable makes a table, or leaves the one that is there.
func (b *Batch) AddTable(t Table, comment string) {
	b.begin(unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, t.Family)
	b.enc.String(unix.NFTA_TABLE_NAME, t.Name)
	b.enc.Bytes(tableUserdata, udata(nil, udComment, comment))
	b.enc.End()
}

// OwnTable makes a table that belongs to the Conn which commits the transaction: others cannot change it, and the kernel
// removes it with all in it when that Conn is closed, or its process ends (NFT_TABLE_F_OWNER, since Linux 5.12).
func (b *Batch) OwnTable(t Table, comment string) {
	const owner = 2 // NFT_TABLE_F_OWNER
	b.begin(unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, t.Family)
	b.enc.String(unix.NFTA_TABLE_NAME, t.Name)
	b.enc.Uint32(unix.NFTA_TABLE_FLAGS, owner)
	b.enc.Bytes(tableUserdata, udata(nil, udComment, comment))
	b.enc.End()
}

// DelTable removes a table and all in it. It must be there.
func (b *Batch) DelTable(t Table) {
	b.begin(unix.NFT_MSG_DELTABLE, 0, t.Family)
	b.enc.String(unix.NFTA_TABLE_NAME, t.Name)
	b.enc.End()
}

// ReplaceTable makes an empty table, in place of one of that name.
func (b *Batch) ReplaceTable(t Table, comment string) {
	b.AddTable(t, comment) // so that deleting cannot fail
	b.DelTable(t)
	b.AddTable(t, comment)
}

// AddChain makes a chain, or leaves the one that is there.
func (b *Batch) AddChain(t Table, c Chain) {
	b.begin(unix.NFT_MSG_NEWCHAIN, unix.NLM_F_CREATE, t.Family)
	b.enc.String(unix.NFTA_CHAIN_TABLE, t.Name)
	b.enc.String(unix.NFTA_CHAIN_NAME, c.Name)
	if h := c.Hook; h != nil {
		at := b.enc.Nest(unix.NFTA_CHAIN_HOOK)
		b.enc.Uint32(unix.NFTA_HOOK_HOOKNUM, h.Number)
		b.enc.Uint32(unix.NFTA_HOOK_PRIORITY, uint32(h.Priority))
		b.enc.Close(at)
		b.enc.Uint32(unix.NFTA_CHAIN_POLICY, 1) // NF_ACCEPT
		b.enc.String(unix.NFTA_CHAIN_TYPE, h.Type)
	}
	b.enc.End()
}

// FlushChain removes the rules of a chain, which must be there.
func (b *Batch) FlushChain(t Table, chain string) {
	b.begin(unix.NFT_MSG_DELRULE, 0, t.Family)
	b.enc.String(unix.NFTA_RULE_TABLE, t.Name)
	b.enc.String(unix.NFTA_RULE_CHAIN, chain)
	b.enc.End()
}

// DelChain removes a chain to which nothing leads any more.
func (b *Batch) DelChain(t Table, chain string) {
	b.begin(unix.NFT_MSG_DELCHAIN, 0, t.Family)
	b.enc.String(unix.NFTA_CHAIN_TABLE, t.Name)
	b.enc.String(unix.NFTA_CHAIN_NAME, chain)
	b.enc.End()
}

// AddRule appends a rule to a chain.
func (b *Batch) AddRule(t Table, chain string, r Rule) {
	b.begin(unix.NFT_MSG_NEWRULE, unix.NLM_F_CREATE|unix.NLM_F_APPEND, t.Family)
	b.enc.String(unix.NFTA_RULE_TABLE, t.Name)
	b.enc.String(unix.NFTA_RULE_CHAIN, chain)
	b.enc.Bytes(unix.NFTA_RULE_EXPRESSIONS|unix.NLA_F_NESTED, r.Exprs)
	typ := uint8(udText)
	if r.Comment {
		typ = udComment
	}
	ud := udata(nil, typ, r.Text)
	ud = append(ud, udHash, 8)
	ud = binary.BigEndian.AppendUint64(ud, r.Hash())
	b.enc.Bytes(unix.NFTA_RULE_USERDATA, ud)
	b.enc.End()
}

// Hash distinguishes rules. It is stored beside the rule, since the kernel does
// not give the expressions back as it got them.
func (r Rule) Hash() uint64 {
	h := fnv.New64a()
	_, _ = h.Write([]byte(r.Text))
	_, _ = h.Write(r.Exprs)
	return h.Sum64()
}

// AddSet makes a set, or leaves the one that is there, which must be of the
// same types.
func (b *Batch) AddSet(t Table, s Set) {
	b.begin(unix.NFT_MSG_NEWSET, unix.NLM_F_CREATE, t.Family)
	b.enc.String(unix.NFTA_SET_TABLE, t.Name)
	b.enc.String(unix.NFTA_SET_NAME, s.Name)
	flags := uint32(0)
	if s.Data != nil {
		flags |= setFlagMap
	}
	if s.Dynamic {
		flags |= setFlagDynamic
	}
	if s.Interval {
		flags |= setFlagInterval
	}
	b.enc.Uint32(unix.NFTA_SET_FLAGS, flags)
	b.enc.Uint32(unix.NFTA_SET_KEY_TYPE, number(s.Key))
	b.enc.Uint32(unix.NFTA_SET_KEY_LEN, uint32(width(s.Key)))
	if s.Data != nil {
		typ := number(s.Data)
		if s.Data[0] == TypeVerdict {
			typ = 0xffffff00 // NFT_DATA_VERDICT
		}
		b.enc.Uint32(unix.NFTA_SET_DATA_TYPE, typ)
		b.enc.Uint32(unix.NFTA_SET_DATA_LEN, uint32(width(s.Data)))
	}
	b.enc.Uint32(unix.NFTA_SET_ID, uint32(len(b.tags)))
	if s.Size != 0 {
		at := b.enc.Nest(unix.NFTA_SET_DESC)
		b.enc.Uint32(unix.NFTA_SET_DESC_SIZE, s.Size)
		b.enc.Close(at)
	}
	ud := udataUint32(nil, udKeyOrder, order(s.Key))
	if s.Data != nil {
		ud = udataUint32(ud, udDataOrder, order(s.Data))
	}
	if s.Comment != "" {
		ud = udata(ud, udSetComment, s.Comment)
	}
	b.enc.Bytes(unix.NFTA_SET_USERDATA, ud)
	b.enc.End()
}

func order(ts []Type) uint32 {
	switch {
	case len(ts) > 1 || ts[0] == TypeVerdict:
		return 0
	case ts[0] == TypeMark || ts[0] == TypeDevice:
		return orderHost
	}
	return orderBig
}

// DelSet removes a set to which no rule refers any more.
func (b *Batch) DelSet(t Table, set string) {
	b.begin(unix.NFT_MSG_DELSET, 0, t.Family)
	b.enc.String(unix.NFTA_SET_TABLE, t.Name)
	b.enc.String(unix.NFTA_SET_NAME, set)
	b.enc.End()
}

// FlushSet removes all elements of a set, which must be there.
func (b *Batch) FlushSet(t Table, set string) {
	b.begin(unix.NFT_MSG_DELSETELEM, 0, t.Family)
	b.enc.String(unix.NFTA_SET_ELEM_LIST_TABLE, t.Name)
	b.enc.String(unix.NFTA_SET_ELEM_LIST_SET, set)
	b.enc.End()
}

// AddElem adds an element, which must not be there yet.
func (b *Batch) AddElem(t Table, set string, e *Elem) {
	b.elem(elemOp{unix.NFT_MSG_NEWSETELEM, t, set}, e)
}

// DelElem removes an element, which must be there. Only its key counts.
func (b *Batch) DelElem(t Table, set string, key []byte) {
	b.elem(elemOp{unix.NFT_MSG_DELSETELEM, t, set}, &Elem{Key: key})
}

// AddRange adds a range of an Interval set, which overlaps no other. Without an end it goes on to the last value.
func (b *Batch) AddRange(t Table, set string, first, end []byte) {
	b.span(elemOp{unix.NFT_MSG_NEWSETELEM, t, set}, first, end)
}

// DelRange removes a range, which must be there.
func (b *Batch) DelRange(t Table, set string, first, end []byte) {
	b.span(elemOp{unix.NFT_MSG_DELSETELEM, t, set}, first, end)
}

func (b *Batch) span(op elemOp, first, end []byte) {
	b.elem(op, &Elem{Key: first})
	if len(end) > 0 {
		b.elem(op, &Elem{Key: end, End: true})
	}
}

// elem appends an element to the message of its neighbours, as long as they
// are of the same kind and fit: an attribute has 64 KiB at most.
func (b *Batch) elem(op elemOp, e *Elem) {
	if b.open != op || len(b.enc.Buf)-b.list > b.closeEvery {
		flags := uint16(0)
		if op.typ == unix.NFT_MSG_NEWSETELEM {
			flags = unix.NLM_F_CREATE | unix.NLM_F_EXCL
		}
		b.begin(op.typ, flags, op.table.Family)
		b.enc.String(unix.NFTA_SET_ELEM_LIST_TABLE, op.table.Name)
		b.enc.String(unix.NFTA_SET_ELEM_LIST_SET, op.set)
		b.list = b.enc.Nest(unix.NFTA_SET_ELEM_LIST_ELEMENTS)
		b.open = op
	}
	at := b.enc.Nest(unix.NFTA_LIST_ELEM)
	k := b.enc.Nest(unix.NFTA_SET_ELEM_KEY)
	b.enc.Bytes(unix.NFTA_DATA_VALUE, e.Key)
	b.enc.Close(k)
	if e.End {
		b.enc.Uint32(unix.NFTA_SET_ELEM_FLAGS, elemIntervalEnd)
	}
	switch {
	case e.Data != nil:
		d := b.enc.Nest(unix.NFTA_SET_ELEM_DATA)
		b.enc.Bytes(unix.NFTA_DATA_VALUE, e.Data)
		b.enc.Close(d)
	case e.Goto != "":
		d := b.enc.Nest(unix.NFTA_SET_ELEM_DATA)
		verdict(&b.enc, verdictGoto, e.Goto)
		b.enc.Close(d)
	}
	if e.Timeout != 0 {
		b.enc.Uint64(unix.NFTA_SET_ELEM_TIMEOUT, e.Timeout)
	}
	if e.Comment != "" {
		b.enc.Bytes(unix.NFTA_SET_ELEM_USERDATA, udata(nil, udComment, e.Comment))
	}
	b.enc.Close(at)
}

func (b *Batch) endElems() {
	if b.open.typ == 0 {
		return
	}
	b.enc.Close(b.list)
	b.enc.End()
	b.open = elemOp{}
}

// finish closes the transaction. Its last message asks for the answer that
// acknowledges that all went well.
func (b *Batch) finish() []byte {
	b.endElems()
	last := 0
	for at := 0; at < len(b.enc.Buf); {
		last = at
		at += (int(binary.NativeEndian.Uint32(b.enc.Buf[at:])) + 3) &^ 3
	}
	flags := binary.NativeEndian.Uint16(b.enc.Buf[last+6:])
	binary.NativeEndian.PutUint16(b.enc.Buf[last+6:], flags|unix.NLM_F_ACK)
	b.enc.Begin(unix.NFNL_MSG_BATCH_END, 0, unix.AF_UNSPEC, unix.NFNL_SUBSYS_NFTABLES)
	b.enc.End()
	return b.enc.Buf
}

// udata appends an entry with a NUL-terminated string, cut to what fits.
func udata(b []byte, typ uint8, s string) []byte {
	s = s[:min(len(s), maxText)]
	b = append(b, typ, uint8(len(s)+1))
	b = append(b, s...)
	return append(b, 0)
}

func udataUint32(b []byte, typ uint8, v uint32) []byte {
	b = append(b, typ, 4)
	return binary.NativeEndian.AppendUint32(b, v)
}

// udataFind returns the entry of a type.
func udataFind(b []byte, typ uint8) []byte {
	for len(b) >= 2 && len(b) >= 2+int(b[1]) {
		if b[0] == typ {
			return b[2 : 2+int(b[1])]
		}
		b = b[2+int(b[1]):]
	}
	return nil
}
