package ipvs

import (
	"strings"
	"testing"
)

// The lines are of Linux 6.1, in both families.
func TestParseConnection(t *testing.T) {
	for line, want := range map[string]string{
		"TCP 0AF40104 816C 0A600064 0050 0AF40102 24A0 ESTABLISHED     899": "10.244.1.4:33132 10.96.0.100:80 10.244.1.2:9376 open",
		"TCP 0AF40104 816C 0A600064 0050 0AF40102 24A0 TIME_WAIT       119": "10.244.1.4:33132 10.96.0.100:80 10.244.1.2:9376",
		"UDP 0AF40104 816C 0A600064 0035 0AF40102 0035 UDP             299": "10.244.1.4:33132 10.96.0.100:53 10.244.1.2:53",
		"TCP fd00:0010:0244:0001:0000:0000:0000:0004 816C fd00:0010:0096:0000:0000:0000:0000:0064 0050 " +
			"fd00:0010:0244:0001:0000:0000:0000:0002 24A0 FIN_WAIT         99": "[fd00:10:244:1::4]:33132 [fd00:10:96::64]:80 " +
			"[fd00:10:244:1::2]:9376 open",
		"TCP 0AF40104 0000 0A600064 0050 0AF40102 24A0 NONE          10799": "persistence",
		"AH  0AF40104 0000 0A600064 0050 0AF40102 24A0 NONE            119": "AH",
		"TCP 0AF40104 816C 0A600064":                                        "error",
		"TCP 0AF4010x 816C 0A600064 0050 0AF40102 24A0 NONE 1":              "error",
		"TCP 0AF40104 1816C 0A600064 0050 0AF40102 24A0 NONE 1":             "error",
	} {
		c, ok, err := parseConnection(line)
		got := strings.Join([]string{c.Client.String(), c.Virtual.String(), c.Dest.String()}, " ")
		if c.Open() {
			got += " open"
		}
		if skip := want == "persistence" || want == "AH"; (err != nil) != (want == "error") || err == nil && ok == skip || ok && got != want {
			t.Errorf("%s: %s, %v, %v; want %s", line, got, ok, err, want)
		}
	}
}

func FuzzParseConnection(f *testing.F) {
	f.Add("TCP 0AF40104 816C 0A600064 0050 0AF40102 24A0 ESTABLISHED     899")
	f.Fuzz(func(t *testing.T, line string) {
		if c, ok, err := parseConnection(line); ok && (err != nil || !c.Client.IsValid() || !c.Virtual.IsValid() || !c.Dest.IsValid()) {
			t.Errorf("%q: %+v, %v", line, c, err)
		}
	})
}
