package nftables

import (
	"errors"
	"fmt"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/testbed"
)

func TestMain(m *testing.M) { testbed.Main(m) }

var mine = Table{Family: IPv4, Name: "mine"}

// dial opens a connection to an empty namespace and runs f there.
func dial(t *testing.T, f func(c *Conn)) {
	t.Helper()
	testbed.NewNetwork(t).Outside("host").Do(func() {
		c, err := Dial()
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = c.Close() }()
		f(c)
	})
}

func list(t *testing.T) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "nft", "list", "ruleset").CombinedOutput()
	if err != nil {
		t.Fatalf("nft: %v\n%s", err, out)
	}
	return string(out)
}

// Every expression, as nft(8) understands it: a second opinion on the bytes.
func TestExpressionsMeanWhatTheyShould(t *testing.T) {
	for want, p := range map[string]*Program{
		"ip saddr 10.0.0.0/9 drop": new(Program).Network(0, 12, 4).Mask(0, PrefixMask(netip.MustParsePrefix("10.0.0.0/9")),
			make([]byte, 4)).Equal(0, []byte{10, 0, 0, 0}).Drop(),
		"ip daddr != 10.0.0.1 return": new(Program).Network(0, 16, 4).NotEqual(0, []byte{10, 0, 0, 1}).Return(),
		"jump other":                  new(Program).Jump("other"),
		"goto other":                  new(Program).Goto("other"),
		"ip daddr @s drop":            new(Program).Network(0, 16, 4).InSet("s", 0).Drop(),
		"dnat ip to ip daddr map @m":  new(Program).Network(0, 16, 4).Map("m", 0, 0).DNAT(IPv4, 0, 1),
		"meta mark vmap @v":           new(Program).Meta(0, MetaMark).VerdictMap("v", 0),
		"meta mark set meta mark | 0x00004000": new(Program).Meta(0, MetaMark).Mask(0, Uint32(^uint32(0x4000)),
			Uint32(0x4000)).SetMark(0),
		"meta mark set 0x00000007":                       new(Program).Value(0, Uint32(7)).SetMark(0),
		"meta mark set numgen random mod 5 offset 65536": new(Program).Number(0, NumberRandom, 5, 65536).SetMark(0),
		"meta mark set numgen inc mod 5":                 new(Program).Number(0, NumberIncrement, 5, 0).SetMark(0),
		"masquerade fully-random":                        new(Program).Masquerade(),
		"reject with tcp reset":                          new(Program).Meta(0, MetaL4Proto).Equal(0, []byte{6}).Reject(ResetTCP()),
		"reject":                                         new(Program).Reject(PortUnreachable(IPv4)),
		"fib saddr type local drop":                      new(Program).AddressType(0, Source).Equal(0, Uint32(TypeLocal)).Drop(),
		"ct status dnat drop": new(Program).Conntrack(0, CtStatus).Mask(0, Uint32(CtStatusDNAT), Uint32(0)).NotEqual(0,
			Uint32(0)).Drop(),
		"ct state invalid drop": new(Program).Conntrack(0, CtState).Mask(0, Uint32(CtStateInvalid),
			Uint32(0)).NotEqual(0, Uint32(0)).Drop(),
		`iif "lo" drop`: new(Program).Meta(0, MetaIif).Equal(0, Uint32(1)).Drop(),
		"tcp flags syn / syn,ack drop": new(Program).Meta(0, MetaL4Proto).Equal(0, []byte{6}).TCPFlags(0).Mask(0,
			[]byte{TCPSyn | TCPAck}, []byte{0}).Equal(0, []byte{TCPSyn}).Drop(),
		"th dport 80 drop": new(Program).Port(0, Destination).Equal(0, []byte{0, 80}).Drop(),
		"update @d { ip saddr timeout 1m : 0x00000001 }": new(Program).Network(0, 12, 4).Value(1, Uint32(1)).Remember("d", 0, 1, 60_000),
		"delete @d { ip saddr : 0x00000001 }":            new(Program).Network(0, 12, 4).Value(1, Uint32(1)).Forget("d", 0, 1),
	} {
		t.Run(want, func(t *testing.T) {
			dial(t, func(c *Conn) {
				hook := &Hook{Type: "nat", Number: Prerouting, Priority: -100}
				if strings.HasPrefix(want, "masq") {
					hook = &Hook{Type: "nat", Number: Postrouting, Priority: 100}
				}
				b := NewBatch()
				b.AddTable(mine, "a test")
				b.AddSet(mine, Set{Name: "s", Key: []Type{TypeIPv4}})
				b.AddSet(mine, Set{Name: "m", Key: []Type{TypeIPv4}, Data: []Type{TypeIPv4, TypePort}})
				b.AddSet(mine, Set{Name: "v", Key: []Type{TypeMark}, Data: []Type{TypeVerdict}})
				b.AddSet(mine, Set{Name: "d", Key: []Type{TypeIPv4}, Data: []Type{TypeMark}, Dynamic: true, Size: 10})
				b.AddChain(mine, Chain{Name: "other"})
				b.AddChain(mine, Chain{Name: "base", Hook: hook})
				b.AddRule(mine, "base", Rule{Exprs: p.Bytes()})
				if err := c.Commit(b); err != nil {
					t.Fatal(err)
				}
				if out := list(t); !strings.Contains(out, "\t\t"+want+"\n") {
					t.Errorf("nft prints\n%s\nwithout %q", out, want)
				}
			})
		})
	}
}

// What is written comes back, and more elements than one message holds.
func TestWriteAndRead(t *testing.T) {
	const n = 5000
	dial(t, func(c *Conn) {
		set := Set{Name: "eps", Key: []Type{TypeIPv4, TypePort}, Data: []Type{TypeIPv4, TypePort}, Comment: "endpoints"}
		verdicts := Set{Name: "v", Key: []Type{TypeMark}, Data: []Type{TypeVerdict}}
		key := func(i int) []byte { return []byte{10, 0, byte(i >> 8), byte(i), 0, 80, 0, 0} }
		b := NewBatch()
		b.AddTable(mine, "mine alone")
		b.AddSet(mine, set)
		b.AddSet(mine, verdicts)
		b.AddChain(mine, Chain{Name: "c"})
		r := Rule{Text: "drop", Exprs: new(Program).Drop().Bytes()}
		b.AddRule(mine, "c", r)
		for i := range n {
			b.AddElem(mine, "eps", &Elem{Key: key(i), Data: key(i + 1), Comment: fmt.Sprint("nr ", i)})
		}
		b.AddElem(mine, "v", &Elem{Key: Uint32(1), Goto: "c"})
		if err := c.Commit(b); err != nil {
			t.Fatal(err)
		}

		if comment, found, err := c.Table(mine); comment != "mine alone" || !found || err != nil {
			t.Errorf("Table = %q, %v, %v", comment, found, err)
		}
		if _, found, err := c.Table(Table{Family: IPv6, Name: "mine"}); found || err != nil {
			t.Errorf("Table of the other family: %v, %v", found, err)
		}
		sets, err := c.Sets(mine)
		if err != nil || len(sets) != 2 || !slices.ContainsFunc(sets, func(s StoredSet) bool { return s.Is(set) }) ||
			slices.ContainsFunc(sets, func(s StoredSet) bool {
				return s.Is(Set{Name: "eps", Key: []Type{TypeIPv4}})
			}) {
			t.Errorf("Sets = %+v, %v", sets, err)
		}
		rules, err := c.Rules(mine)
		if err != nil || len(rules["c"]) != 1 || rules["c"][0].Text != "drop" || rules["c"][0].Hash != r.Hash() {
			t.Errorf("Rules = %+v, %v", rules, err)
		}
		seen := map[string]string{}
		err = c.Elems(mine, "eps", func() { clear(seen) }, func(e Elem) { seen[string(e.Key)] = string(e.Data) + e.Comment })
		if err != nil || len(seen) > n || len(seen) < n/2 {
			t.Errorf("Elems: %d elements, %v", len(seen), err)
		}
		var keys [][]byte
		for i := range n + 10 {
			keys = append(keys, key(i))
		}
		// Those that are missing, at the start and between, cost no other.
		keys = append([][]byte{key(n + 100)}, slices.Insert(keys, 700, key(n+200), key(n+300))...)
		clear(seen)
		if err := c.Get(mine, "eps", keys, func(e Elem) { seen[string(e.Key)] = string(e.Data) + e.Comment }); err != nil {
			t.Fatal(err)
		}
		for i := range n {
			if want := string(key(i+1)) + fmt.Sprint("nr ", i); seen[string(key(i))] != want {
				t.Fatalf("element %d is %q, want %q", i, seen[string(key(i))], want)
			}
		}
		if len(seen) != n {
			t.Errorf("Get found %d elements, want %d", len(seen), n)
		}
		var chains []string
		err = c.Elems(mine, "v", func() { chains = nil }, func(e Elem) { chains = append(chains, e.Goto) })
		if err != nil || !slices.Equal(chains, []string{"c"}) {
			t.Errorf("verdicts %v, %v", chains, err)
		}
	})
}

func TestCommitIsAllOrNothingAndNamesTheCause(t *testing.T) {
	dial(t, func(c *Conn) {
		b := NewBatch()
		b.AddTable(mine, "")
		b.AddSet(mine, Set{Name: "s", Key: []Type{TypeIPv4}})
		if err := c.Commit(b); err != nil {
			t.Fatal(err)
		}
		before, err := c.Generation()
		if err != nil {
			t.Fatal(err)
		}
		b = NewBatch()
		b.Tag("good")
		b.AddElem(mine, "s", &Elem{Key: []byte{10, 0, 0, 1}})
		b.Tag("bad")
		b.DelElem(mine, "s", []byte{10, 0, 0, 2})
		b.Tag("also bad")
		b.AddElem(mine, "none", &Elem{Key: []byte{10, 0, 0, 3}})
		err = c.Commit(b)
		var r *Refusal
		if !errors.As(err, &r) || !slices.Equal(r.Tags, []any{"bad", "also bad"}) || !errors.Is(err, unix.ENOENT) {
			t.Errorf("Commit = %v of %v, want ENOENT of bad and also bad", err, r)
		}
		if after, err := c.Generation(); err != nil || after != before {
			t.Errorf("generation %d after a refusal, %v, want %d", after, err, before)
		}
		if strings.Contains(list(t), "10.0.0.1") {
			t.Error("a part of the refused transaction is there")
		}
		b = NewBatch()
		b.AddElem(mine, "s", &Elem{Key: []byte{10, 0, 0, 1}})
		if err := c.Commit(b); err != nil {
			t.Error(err)
		}
		if after, err := c.Generation(); err != nil || after != before+1 {
			t.Errorf("generation %d after a change, %v, want %d", after, err, before+1)
		}
		b = NewBatch()
		for i := 0; b.Size() <= c.MaxBatch(); i++ {
			b.AddElem(mine, "s", &Elem{Key: Uint32(uint32(i)), Comment: strings.Repeat("x", 200)})
		}
		if err := c.Commit(b); !errors.Is(err, unix.EMSGSIZE) || !strings.Contains(err.Error(), "net.core.wmem_max") {
			t.Errorf("too large a transaction: %v", err)
		}
	})
}

func TestReadingWhatIsNotThere(t *testing.T) {
	dial(t, func(c *Conn) {
		if ch, err := c.Chains(mine); err != nil || ch != nil {
			t.Errorf("Chains = %v, %v", ch, err)
		}
		if s, err := c.Sets(mine); err != nil || s != nil {
			t.Errorf("Sets = %v, %v", s, err)
		}
		if r, err := c.Rules(mine); err != nil || len(r) != 0 {
			t.Errorf("Rules = %v, %v", r, err)
		}
		if err := c.Elems(mine, "s", func() {}, func(Elem) { t.Error("an element") }); err != nil {
			t.Error(err)
		}
	})
}

// A table that translates destinations goes in two transactions: no packet meets
// rules whose maps are gone.
func TestRemoveEmptiesTheWayInFirst(t *testing.T) {
	for name, hook := range map[string]*Hook{
		"nothing comes in": nil,
		"output":           {Type: "nat", Number: Output, Priority: -100},
		"prerouting":       {Type: "nat", Number: Prerouting, Priority: -100},
	} {
		t.Run(name, func(t *testing.T) {
			dial(t, func(c *Conn) {
				b := NewBatch()
				b.AddTable(mine, "a test")
				b.AddChain(mine, Chain{Name: "way", Hook: hook})
				b.AddRule(mine, "way", NewRule(new(Program).Drop(), "drop"))
				if err := c.Commit(b); err != nil {
					t.Fatal(err)
				}
				before, err := c.Generation()
				if err != nil {
					t.Fatal(err)
				}
				if err := Remove(t.Context(), mine.Name); err != nil {
					t.Fatal(err)
				}
				after, err := c.Generation()
				if want := uint32(map[bool]int{false: 2, true: 1}[hook == nil]); err != nil || after-before != want {
					t.Errorf("%d transactions, %v, want %d", after-before, err, want)
				}
				if out := list(t); out != "" {
					t.Errorf("left:\n%s", out)
				}
			})
		})
	}
}
