package corefile

import (
	"regexp"
	"slices"
	"strconv"
	"strings"

	mdns "github.com/miekg/dns"
)

// Rewrite is one rule that changes questions, and the answers to them.
type Rewrite struct {
	// Continue tries the next rule as well.
	Continue bool
	// Field is name, type, class, ttl or rcode.
	Field string
	// Kind is how a name matches: exact, prefix, suffix, substring or regex.
	Kind    string
	From    string
	To      string
	Pattern *regexp.Regexp
	// Auto changes the names of the answer back; Answers are other changes of it.
	Auto    bool
	Answers []AnswerRewrite
	// FromCode and ToCode are the types, classes or response codes.
	FromCode, ToCode uint16
	// MinTTL and MaxTTL bound the TTLs of the answer.
	MinTTL, MaxTTL uint32
}

// AnswerRewrite changes owner names of an answer or, with Value, the names in its data.
type AnswerRewrite struct {
	Value   bool
	Pattern *regexp.Regexp
	To      string
}

// PluginName is the name of the directive.
func (*Rewrite) PluginName() string { return "rewrite" }

var nameKinds = []string{"exact", "prefix", "suffix", "substring", "regex"}

func parseRewrite(_ *Block, l line) (Plugin, error) {
	args := slices.Clone(l.args)
	r := &Rewrite{}
	if len(args) > 0 && (args[0] == "stop" || args[0] == "continue") {
		r.Continue = args[0] == "continue"
		args = args[1:]
	}
	for _, p := range l.body {
		args = append(append(args, p.name), p.args...)
	}
	if len(args) < 3 {
		return nil, l.pos.errorf("rewrite: got %d arguments; want [stop|continue] FIELD FROM TO", len(l.args))
	}
	r.Field = strings.ToLower(args[0])
	l.args = args[1:]
	switch r.Field {
	case "name":
		return r, r.readName(l)
	case "type":
		return r, r.codes(l, mdns.StringToType)
	case "class":
		return r, r.codes(l, mdns.StringToClass)
	case "ttl":
		return r, r.readTTL(l)
	case "rcode":
		return r, r.readRcode(l)
	}
	return nil, l.pos.errorf("rewrite: %q is not supported; want one of class, name, rcode, ttl, type", r.Field)
}

// matcher reads "[KIND] FROM" from a line with n further arguments, and returns those.
func (r *Rewrite) matcher(l line, n int) ([]string, error) {
	args := l.args
	r.Kind = "exact"
	if len(args) > n+1 && slices.Contains(nameKinds, strings.ToLower(args[0])) {
		r.Kind, args = strings.ToLower(args[0]), args[1:]
	}
	if len(args) < n+1 {
		return nil, l.errArgs("[exact|prefix|suffix|substring|regex] FROM TO")
	}
	r.From = args[0]
	switch r.Kind {
	case "regex":
		var err error
		if r.Pattern, err = l.regexp(r.From); err != nil {
			return nil, err
		}
	default:
		// CoreDNS adds a dot to prefixes and parts too, so that they end a label.
		r.From = normal(r.From)
	}
	return args[1:], nil
}

// normal returns a name in lower case with a dot at its end.
func normal(s string) string { return strings.ToLower(mdns.Fqdn(s)) }

// readName reads "[KIND] FROM TO [answer auto] [answer name FROM TO] [answer value FROM TO]".
func (r *Rewrite) readName(l line) error {
	rest, err := r.matcher(l, 1)
	if err != nil {
		return err
	}
	r.To, rest = normal(rest[0]), rest[1:]
	r.Auto = r.Kind == "exact"
	for len(rest) > 0 {
		if rest[0] != "answer" || len(rest) < 2 {
			return l.pos.errorf("rewrite: %q is not one of answer auto, answer name FROM TO, answer value FROM TO", strings.Join(rest, " "))
		}
		if rest[1] == "auto" {
			r.Auto, rest = true, rest[2:]
			continue
		}
		a := AnswerRewrite{Value: rest[1] == "value"}
		skip := 1
		if rest[1] == "name" || rest[1] == "value" {
			skip = 2
		}
		if len(rest) < skip+2 {
			return l.pos.errorf("rewrite: answer has %d arguments; want answer name FROM TO, or answer value FROM TO", len(rest)-1)
		}
		if a.Pattern, err = l.regexp(rest[skip]); err != nil {
			return err
		}
		a.To = normal(rest[skip+1])
		r.Answers = append(r.Answers, a)
		rest = rest[skip+2:]
	}
	return nil
}

// codes reads "FROM TO" of types or classes.
func (r *Rewrite) codes(l line, known map[string]uint16) error {
	if err := l.want(2, 2, "FROM TO"); err != nil {
		return err
	}
	for i, to := range []*uint16{&r.FromCode, &r.ToCode} {
		code, ok := known[strings.ToUpper(l.args[i])]
		if !ok {
			return l.pos.errorf("rewrite: %q is not a known %s", l.args[i], r.Field)
		}
		*to = code
	}
	return nil
}

// readTTL reads "[KIND] FROM TTL", "[KIND] FROM MIN-MAX".
func (r *Rewrite) readTTL(l line) error {
	rest, err := r.matcher(l, 1)
	if err != nil {
		return err
	}
	low, high, isRange := strings.Cut(rest[0], "-")
	if !isRange {
		high = low
	} else if low == "" {
		low = "0"
	}
	if isRange && high == "" {
		high = strconv.Itoa(maxSeconds - 1)
	}
	from, err1 := strconv.ParseUint(low, 10, 32)
	to, err2 := strconv.ParseUint(high, 10, 32)
	if err1 != nil || err2 != nil || from > to || rest[0] == "-" {
		return l.pos.errorf("rewrite: %q is neither a TTL in seconds nor a range such as 30-300", rest[0])
	}
	r.MinTTL, r.MaxTTL = uint32(from), uint32(to)
	return nil
}

// readRcode reads "[KIND] NAME FROM TO".
func (r *Rewrite) readRcode(l line) error {
	rest, err := r.matcher(l, 2)
	if err != nil {
		return err
	}
	l.args = rest
	codes, err := rcodes(l)
	if err != nil || len(codes) != 2 {
		return l.pos.errorf("rewrite: rcode needs [KIND] NAME FROM TO, with names of response codes such as NXDOMAIN")
	}
	r.FromCode, r.ToCode = uint16(codes[0]), uint16(codes[1])
	return nil
}
