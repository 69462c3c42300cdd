package iptables

import (
	"bufio"
	"context"
	"errors"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
)

func TestMain(m *testing.M) { testbed.Main(m) }

// each runs a test with the programs of each variant and family, in an empty
// network namespace.
func each(t *testing.T, f func(*testing.T, *Tool)) {
	for _, v := range []Variant{NFT, Legacy} {
		for _, fam := range []svc.Family{svc.IPv4, svc.IPv6} {
			t.Run(v.String()+"/"+fam.String(), func(t *testing.T) {
				tool, err := New(v, fam)
				if err != nil {
					t.Fatal(err)
				}
				testbed.NewNetwork(t).Outside("host").Do(func() { f(t, tool) })
			})
		}
	}
}

// list is what a table has.
func list(t *testing.T, tool *Tool, table string) (chains, rules []string) {
	t.Helper()
	err := tool.Save(t.Context(), table, func(c string) { chains = append(chains, c) },
		func(_, line string) { rules = append(rules, line) })
	if err != nil {
		t.Fatal(err)
	}
	return chains, rules
}

func TestRestoreAndSave(t *testing.T) {
	each(t, func(t *testing.T, tool *Tool) {
		for _, input := range []string{
			"*nat\n:OTHER - [0:0]\n-A OTHER -p udp -j RETURN\nCOMMIT\n",
			"*nat\n:MINE - [0:0]\n-A MINE -p tcp -m tcp --dport 80 -j RETURN\n-A MINE -j ACCEPT\nCOMMIT\n",
			"*nat\n:MINE - [0:0]\n-A MINE -j RETURN\nCOMMIT\n",
		} {
			if err := tool.Restore(t.Context(), []byte(input)); err != nil {
				t.Fatal(err)
			}
		}
		chains, rules := list(t, tool, "nat")
		for _, c := range []string{"PREROUTING", "OTHER", "MINE"} {
			if !slices.Contains(chains, c) {
				t.Errorf("chains %q, want %s among them", chains, c)
			}
		}
		slices.Sort(rules)
		if want := []string{"-A MINE -j RETURN", "-A OTHER -p udp -j RETURN"}; !slices.Equal(rules, want) {
			t.Errorf("rules %q, want %q", rules, want)
		}
		of := map[string]string{}
		if err := tool.SaveAll(t.Context(), func(table, name string) { of[name] += "chain of " + table },
			func(table, chain, line string) { of[chain] += ", " + table + " " + line }); err != nil {
			t.Fatal(err)
		}
		if want := "chain of nat, nat -A MINE -j RETURN"; of["MINE"] != want {
			t.Errorf("SaveAll returns %q, want %q", of["MINE"], want)
		}
		var seen []string
		if err := tool.Tables(t.Context(), func(c string) { seen = append(seen, c) }, func(string, string) {}); err != nil {
			t.Fatal(err)
		}
		if !slices.Contains(seen, "MINE") {
			t.Errorf("all tables have chains %q, want MINE among them", seen)
		}
	})
}

// Either all of a table's changes are made or none.
func TestRefusal(t *testing.T) {
	each(t, func(t *testing.T, tool *Tool) {
		err := tool.Restore(t.Context(), []byte("*nat\n:MINE - [0:0]\n-A MINE -j RETURN\n-A MINE -j NOWHERE-TO-GO\nCOMMIT\n"))
		var e *Error
		if !errors.As(err, &e) || e.Code <= 0 || e.Said == "" || e.Busy() || strings.Contains(err.Error(), "\n") {
			t.Errorf("%#v (%v), want an Error with the program's output", err, err)
		}
		if chains, _ := list(t, tool, "nat"); slices.Contains(chains, "MINE") {
			t.Errorf("chains %q: the refused change was made in part", chains)
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := tool.Restore(ctx, []byte("*nat\nCOMMIT\n")); !errors.Is(err, context.Canceled) {
			t.Errorf("%v, want that it was cancelled", err)
		}
	})
}

func startsWithMine(chain string) bool { return strings.HasPrefix(chain, "MINE-") }

// What is one program's goes, from every table, and nothing else; where there is
// nothing, no table comes about.
func TestRemoveChains(t *testing.T) {
	each(t, func(t *testing.T, tool *Tool) {
		remove := func() {
			t.Helper()
			if err := tool.RemoveChains(t.Context(), startsWithMine); err != nil {
				t.Fatal(err)
			}
		}
		remove()
		if err := tool.Tables(t.Context(), func(c string) { t.Errorf("chain %s in an empty namespace", c) },
			func(string, string) {}); err != nil {
			t.Fatal(err)
		}
		const others = "*nat\n:OTHER - [0:0]\n-A POSTROUTING -j OTHER\n-A OTHER -m comment --comment \"MINE-A\" -j RETURN\nCOMMIT\n*mangle\n" +
			"-A INPUT -j ACCEPT\nCOMMIT\n"
		const mine = "*nat\n:MINE-A - [0:0]\n:MINE-B - [0:0]\n-I POSTROUTING -j MINE-A\n-A OTHER -g MINE-B\n-A MINE-A -j MINE-B\nCOMMIT\n" +
			"*filter\n:MINE-C - [0:0]\nCOMMIT\n"
		for _, input := range []string{others, mine} {
			if err := tool.Restore(t.Context(), []byte(input)); err != nil {
				t.Fatal(err)
			}
		}
		if p, err := tool.Part(t.Context(), startsWithMine); err != nil || p.Chains != 3 {
			t.Errorf("Part = %+v, %v, want 3 chains", p, err)
		}
		for range 2 {
			remove()
			chains, rules := list(t, tool, "nat")
			if slices.ContainsFunc(chains, startsWithMine) || !slices.Contains(chains, "OTHER") {
				t.Errorf("chains %q", chains)
			}
			if want := []string{"-A POSTROUTING -j OTHER", "-A OTHER -m comment --comment MINE-A -j RETURN"}; !slices.Equal(rules, want) {
				t.Errorf("rules %q, want %q", rules, want)
			}
			if chains, _ := list(t, tool, "filter"); slices.Contains(chains, "MINE-C") {
				t.Errorf("chains %q of table filter", chains)
			}
			if _, rules := list(t, tool, "mangle"); len(rules) != 1 {
				t.Errorf("rules %q of table mangle, want the one there was", rules)
			}
		}
	})
}

// Each passes over nothing that is installed, and names what fails.
func TestEach(t *testing.T) {
	testbed.NewNetwork(t).Outside("host").Do(func() {
		var seen []string
		err := Each(func(tool *Tool) error {
			seen = append(seen, tool.Variant().String()+" "+tool.Family().String())
			return errors.New("no " + seen[len(seen)-1])
		})
		if want := []string{"nf_tables IPv4", "nf_tables IPv6", "legacy IPv4", "legacy IPv6"}; !slices.Equal(seen, want) {
			t.Errorf("called for %q, want %q", seen, want)
		}
		if err == nil || !strings.Contains(err.Error(), "iptables legacy IPv6: no legacy IPv6") ||
			!strings.Contains(err.Error(), "no nf_tables IPv4") {
			t.Errorf("error %v, want one that names all", err)
		}
	})
}

// A table that iptables cannot read is reported if there is something to remove
// beside it.
func TestPartOfUnreadableTables(t *testing.T) {
	testbed.NewNetwork(t).Outside("host").Do(func() {
		tool, err := New(NFT, svc.IPv4)
		if err != nil {
			t.Fatal(err)
		}
		cmd := exec.CommandContext(t.Context(), "nft", "-f", "-")
		cmd.Stdin = strings.NewReader("table ip nat { chain c { numgen inc mod 2 0 accept; }; }")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		if err := tool.RemoveChains(t.Context(), startsWithMine); err != nil {
			t.Errorf("%v, though nothing of ours is anywhere", err)
		}
		if err := tool.Restore(t.Context(), []byte("*filter\n:MINE-C - [0:0]\nCOMMIT\n")); err != nil {
			t.Fatal(err)
		}
		if err := tool.RemoveChains(t.Context(), startsWithMine); err == nil || !strings.Contains(err.Error(), "cannot be read") {
			t.Errorf("%v, want that table nat cannot be read", err)
		}
		if chains, _ := list(t, tool, "filter"); slices.Contains(chains, "MINE-C") {
			t.Errorf("chains %q", chains)
		}
	})
}

func TestTablesAddsNone(t *testing.T) {
	testbed.NewNetwork(t).Outside("host").Do(func() {
		tool, err := New(Legacy, svc.IPv4)
		if err != nil {
			t.Fatal(err)
		}
		err = tool.Tables(t.Context(), func(c string) { t.Errorf("chain %s in an empty namespace", c) }, func(string, string) {})
		if err != nil {
			t.Error(err)
		}
	})
}

// What a program prints is foreign: whatever it is, it ends in lines or an
// error.
func FuzzRead(f *testing.F) {
	f.Add("# Generated\n*nat\n:PREROUTING ACCEPT [0:0]\n:MINE - [0:0]\n-A MINE -j RETURN\nCOMMIT\n")
	f.Add("# Table `nat' is incompatible, use 'nft' tool.\n")
	f.Add(":\n-A \n\x00")
	f.Fuzz(func(t *testing.T, text string) {
		r := reader{chain: func(name string) {
			if name == "" || strings.Contains(name, " ") {
				t.Errorf("chain %q", name)
			}
		}, rule: func(chain, line string) {
			if chain == "" || !strings.HasPrefix(line, "-A "+chain) || strings.Contains(line, "\n") {
				t.Errorf("chain %q, line %q", chain, line)
			}
		}}
		_ = r.read(bufio.NewReaderSize(strings.NewReader(text), 16))
	})
}

func TestReadComplains(t *testing.T) {
	for _, text := range []string{"# Table `nat' is incompatible, use 'nft' tool.\n", ":\n", "-A \n", "hello\n"} {
		r := reader{rule: func(string, string) {}}
		if err := r.read(bufio.NewReader(strings.NewReader(text))); err == nil {
			t.Errorf("%q: no error", text)
		}
	}
}
