package nftables

import "testing"

// However many rules look up large sets, the look keeps a bounded number of rules.
func TestDecodedRulesAreBounded(t *testing.T) {
	addresses, verdicts := make([]element, 500), make([]element, 500)
	for i := range addresses {
		addresses[i].first = []byte{10, 244, byte(i >> 8), byte(i)}
		verdicts[i] = addresses[i]
		verdicts[i].hasVerdict, verdicts[i].verdict = true, Drops
	}
	sets := &setReader{decoded: maxDecoded}
	rules := func(several []element) []Decoded {
		d := decoder{sets: sets, several: several, from: loaded{field: "saddr", bits: 32}, rule: Decoded{Verdict: Accepts}}
		return d.all()
	}
	n := 0
	for range 1000 {
		n += len(rules(addresses))
	}
	if most := maxDecoded + 1000; n > most || n < maxDecoded {
		t.Errorf("1000 rules that look up 500 addresses stand for %d rules, want %d to %d", n, maxDecoded, most)
	}
	if got := rules(addresses); len(got) != 1 || !got[0].Opaque || got[0].Verdict != Accepts || got[0].Source.IsValid() {
		t.Errorf("without room: %+v, want one rule for packets that are not known", got)
	}
	if got := rules(verdicts); len(got) != 1 || got[0].Verdict != Other {
		t.Errorf("verdicts without room: %+v, want one whose verdict is not known", got)
	}
	plain := decoder{sets: sets, rule: Decoded{Verdict: Drops}}
	if got := plain.all(); len(got) != 1 || got[0].Opaque || got[0].Verdict != Drops {
		t.Errorf("a rule without a set: %+v", got)
	}
}
