package http1

import "bytes"

// Body follows the framing of a body. The zero value is of a message without one.
type Body struct {
	kind   bodyKind
	strict bool
	state  chunkState
	left   uint64 // of the body or of the chunk
}

type bodyKind uint8

const (
	none bodyKind = iota
	sized
	chunked
	endless // until the end of the connection
)

type chunkState uint8

const (
	atSize chunkState = iota
	inData
	afterData
	inTrailers
)

const (
	// maxSizeLine bounds the line before a chunk. In requests it has only digits.
	maxSizeLine   = 256
	maxSizeDigits = 15
	// maxTrailers bounds trailers.
	maxTrailers = 8 << 10
)

// Done reports whether all of the body was taken.
func (b *Body) Done() bool { return b.kind == none }

// Sized returns how many bytes there are to come, if that is known.
func (b *Body) Sized() (uint64, bool) { return b.left, b.kind == sized }

// Endless reports whether the body ends with the connection.
func (b *Body) Endless() bool { return b.kind == endless }

// Skip takes n bytes of a Sized body that were carried otherwise.
func (b *Body) Skip(n uint64) { b.take(n) }

func (b *Body) take(n uint64) {
	if b.left -= n; b.left == 0 {
		b.kind = none
	}
}

// Next returns the next data in p, which comes after what was taken before, and how many bytes were taken with it. If
// none are taken p has too little. Trailers are the fields at the end; they are part of p.
func (b *Body) Next(p []byte, trailers []Field) (data []byte, taken int, _ []Field, err error) {
	switch b.kind {
	case endless:
		return p, len(p), trailers, nil
	case sized:
		n := min(uint64(len(p)), b.left)
		b.take(n)
		return p[:n], int(n), trailers, nil
	case none:
		return nil, 0, trailers, nil
	}
	for {
		rest := p[taken:]
		n := 0
		switch b.state {
		case atSize:
			n, err = b.size(rest)
		case inData:
			m := min(uint64(len(rest)), b.left)
			if b.left -= m; b.left == 0 {
				b.state = afterData
			}
			return rest[:m], taken + int(m), trailers, nil
		case afterData:
			if n = min(2, len(rest)); string(rest[:n]) != "\r\n"[:n] {
				return nil, taken, trailers, ErrMalformed
			} else if n == 2 {
				b.state = atSize
			} else {
				n = 0
			}
		case inTrailers:
			n, trailers, err = b.trailers(rest, trailers)
			if n > 0 || err != nil {
				return nil, taken + n, trailers, err
			}
		}
		if n == 0 || err != nil {
			return nil, taken, trailers, err
		}
		taken += n
	}
}

// size reads the line before a chunk. Extensions have no use and many ways to be read: requests have none.
func (b *Body) size(p []byte) (int, error) {
	i := bytes.IndexByte(p, '\n')
	text := p
	if i >= 0 {
		text = p[:i]
	}
	whole := bytes.HasSuffix(text, cr)
	if whole {
		text = text[:len(text)-1]
	}
	digits := 0
	size := uint64(0)
	for digits < len(text) && classes[text[digits]]&digitByte != 0 {
		c := lower(text[digits])
		if c >= 'a' {
			c -= 'a' - '0' - 10
		}
		size = size<<4 | uint64(c-'0')
		digits++
		if digits > maxSizeDigits {
			return 0, ErrMalformed
		}
	}
	rest := text[digits:]
	if b.strict && len(rest) > 0 || len(rest) > maxSizeLine || !all(rest, valueByte) ||
		len(rest) > 0 && len(trim(rest)) > 0 && trim(rest)[0] != ';' {
		return 0, ErrMalformed
	}
	if i < 0 {
		return 0, nil
	}
	if digits == 0 || b.strict && !whole {
		return 0, ErrMalformed
	}
	if b.state, b.left = inData, size; size == 0 {
		b.state = inTrailers
	}
	return i + 1, nil
}

// trailers reads the fields after the last chunk, and takes none before it has all. What frames a message is not
// allowed among them.
func (b *Body) trailers(p []byte, to []Field) (int, []Field, error) {
	for taken := 0; ; {
		i := bytes.IndexByte(p[taken:], '\n')
		if i < 0 {
			if len(p) > maxTrailers || b.strict && !plausible(p[taken:]) {
				return 0, to, ErrMalformed
			}
			return 0, to[:0], nil
		}
		text := p[taken : taken+i]
		if whole := bytes.HasSuffix(text, cr); whole {
			text = text[:len(text)-1]
		} else if b.strict {
			return 0, to, ErrMalformed
		}
		taken += i + 1
		if len(text) == 0 {
			b.kind = none
			return taken, to, nil
		}
		f, err := field(text)
		if err != nil || f.Kind == ContentLength || f.Kind == TransferEncoding || taken > maxTrailers {
			return 0, to, ErrMalformed
		}
		to = append(to, f)
	}
}
