package process

import (
	"os"
	"strings"
	"testing"
	"time"
)

func TestParseStat(t *testing.T) {
	const text = "1234 (a) b (c)) S 1 77 77 0 -1 4194560 1 2 3 4 150 50 7 3 20 0 1 0 987654 11 12 18446744073709551615\n"
	got, err := parseStat(text)
	want := Stat{State: 'S', Group: 77, CPU: 2 * time.Second, ChildCPU: 100 * time.Millisecond, Start: 987654, Resident: 12 * os.Getpagesize()}
	if err != nil || got != want {
		t.Errorf("got %+v, %v; want %+v", got, err, want)
	}
	for _, bad := range []string{"", "1 (x", "1 (x) S 1 2", strings.Replace(text, "987654", "x", 1)} {
		if _, err := parseStat(bad); err == nil {
			t.Errorf("%q gave no error", bad)
		}
	}
}

func TestReadStat(t *testing.T) {
	s, err := ReadStat(os.Getpid())
	if err != nil || s.State == Zombie || s.Start == 0 || s.Resident < 1<<20 {
		t.Errorf("of this process: %+v, %v", s, err)
	}
	if _, err := ReadStat(1 << 30); err == nil {
		t.Error("a process that cannot exist has a Stat")
	}
}
