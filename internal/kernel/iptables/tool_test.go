package iptables

import (
	"bufio"
	"context"
	"errors"
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
		if err := tool.SaveAll(t.Context(), func(table, name string) { of[name] += "chain of " + table }, func(table, chain, line string) { of[chain] += ", " + table + " " + line }); err != nil {
			t.Fatal(err)
		}
		if want := "chain of nat, nat -A MINE -j RETURN"; of["MINE"] != want {
			t.Errorf("SaveAll says %q, want %q", of["MINE"], want)
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
			t.Errorf("%#v (%v), want an Error that tells what the program said", err, err)
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
