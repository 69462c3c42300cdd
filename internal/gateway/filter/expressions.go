package filter

import "regexp"

// Expressions are the regular expressions of hosts. One that is the same as before is not compiled again.
type Expressions struct {
	before, now map[string]*compiled
	sizes       map[string]int // of programs, by host: each of its requests pays for all
	most        int
}

type compiled struct {
	*regexp.Regexp
	size  int
	wrong string
}

// NewExpressions returns no expressions, of which each host may have a size. before may be nil.
func NewExpressions(before *Expressions, most int) *Expressions {
	x := &Expressions{now: map[string]*compiled{}, sizes: map[string]int{}, most: most}
	if before != nil {
		x.before = before.now
	}
	return x
}

// Add compiles an expression of a host. The key names the text and how it is compiled. wrong is why it cannot be used, "" if it can.
func (x *Expressions) Add(host, key, text string, compile func(string) (*regexp.Regexp, string)) (re *regexp.Regexp, wrong string) {
	e := x.now[key]
	if e == nil {
		e = x.before[key]
	}
	if e == nil {
		e = &compiled{}
		if e.size, e.wrong = RegexSize(text); e.wrong == "" {
			e.Regexp, e.wrong = compile(text)
		}
	}
	x.now[key] = e
	switch {
	case e.wrong != "":
		return nil, e.wrong
	case x.sizes[host]+e.size > x.most:
		return nil, "the regular expressions of the host are too complex together"
	}
	x.sizes[host] += e.size
	return e.Regexp, ""
}
