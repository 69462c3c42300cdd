package web

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/fairlead/fairlead/internal/gateway/policy"
	"github.com/fairlead/fairlead/internal/lb/proxied/heads"
	"github.com/fairlead/fairlead/internal/lb/proxied/http1"
	"github.com/fairlead/fairlead/internal/lb/proxied/http2"
	"github.com/fairlead/fairlead/internal/lb/proxied/stream"
)

// source is where a body comes from.
type source interface {
	// next returns what has come, nothing if that is none, and whether it is the end. It is valid until take.
	next() (data []byte, last bool, err error)
	// take takes what next has returned.
	take()
	// fill waits for more. It fails with os.ErrDeadlineExceeded after poll, and soon after wake, which another goroutine calls.
	fill(poll time.Duration) error
	wake()
	// done reports whether all was taken, and sized how much is to come, if that is known.
	done() bool
	sized() (uint64, bool)
	// trailers are the fields behind it.
	trailers() []http1.Field
}

// sink is where a body goes to.
type sink interface {
	// add adds data. It may be written later, by flush.
	add(data []byte, last bool) error
	flush() error
	pending() bool
	// finish writes the rest, and the end.
	finish(trailers []http1.Field) error
}

// wireSource is a body of HTTP/1.1.
type wireSource struct {
	from   *wire
	body   http1.Body
	fields []http1.Field
	taken  int
	closed bool // an endless body has ended
}

func (s *wireSource) next() (data []byte, last bool, err error) {
	for !s.body.Done() {
		data, taken, fields, err := s.body.Next(s.from.buffered(), s.fields[:0])
		if s.fields = fields; err != nil {
			return nil, false, err
		}
		if len(data) > 0 {
			s.taken = taken
			return data, s.body.Done(), nil
		}
		if taken == 0 {
			break
		}
		s.from.take(taken)
	}
	return nil, false, nil
}

func (s *wireSource) take() { s.from.take(s.taken) }

func (s *wireSource) fill(poll time.Duration) error {
	err := s.from.fill(poll, 0)
	if s.body.Endless() && errors.Is(err, io.EOF) {
		s.closed = true
		return nil
	}
	return err
}

func (s *wireSource) wake() { _ = s.from.conn.SetReadDeadline(time.Unix(1, 0)) }

func (s *wireSource) done() bool { return s.closed || s.body.Done() }

func (s *wireSource) sized() (uint64, bool) { return s.body.Sized() }

func (s *wireSource) trailers() []http1.Field { return s.fields }

// wireSink is a body of HTTP/1.1.
type wireSink struct {
	to      *wire
	chunked bool
	timeout time.Duration
}

// add adds data to the output, and writes it once it is large.
func (s *wireSink) add(data []byte, _ bool) error {
	const around = 24 // bytes of the size and of line ends, at most
	to := s.to
	if to.free() < around {
		if err := to.flush(s.timeout); err != nil {
			return err
		}
	}
	if s.chunked {
		to.out = append(strconv.AppendUint(to.out, uint64(len(data)), 16), crlf...)
	}
	if len(data)+len(crlf) <= to.free() {
		to.put(data)
	} else if err := errors.Join(to.flush(s.timeout), to.write(data, s.timeout)); err != nil {
		return err
	}
	if s.chunked {
		to.put(crlf)
	}
	return nil
}

func (s *wireSink) flush() error { return s.to.flush(s.timeout) }

func (s *wireSink) pending() bool { return len(s.to.out) > 0 }

func (s *wireSink) finish(trailers []http1.Field) error {
	if s.chunked {
		s.to.put([]byte("0\r\n"))
		w := heads.Writer{Encoder: http2.Encoder{Block: s.to.out}}
		w.Trailers(trailers)
		s.to.out = w.Block
	}
	return s.to.flush(s.timeout)
}

// streamSource is a body of HTTP/2.
type streamSource struct {
	*http2.Stream
	length int64 // of the body, -1 if that is not known
	at     int
}

func (s *streamSource) next() (data []byte, last bool, err error) {
	data, last = s.Peek()
	s.at = len(data)
	return data, last, nil
}

func (s *streamSource) take() {
	s.Take(s.at)
	if s.length > 0 {
		s.length -= int64(s.at)
	}
}

func (s *streamSource) fill(poll time.Duration) error { return s.Fill(poll) }

func (s *streamSource) wake() { s.Wake() }

func (s *streamSource) done() bool { return s.Ended() }

func (s *streamSource) sized() (uint64, bool) {
	if s.length < 0 {
		return 0, false
	}
	return uint64(s.length), true
}

func (s *streamSource) trailers() []http1.Field { return s.Trailers() }

// streamSink is a body of HTTP/2.
type streamSink struct {
	*http2.Stream
	w       *heads.Writer // of trailers, empty
	timeout time.Duration
	waits   bool // for flush
	ended   bool
	closes  bool // the stream is closed right behind the end, which writes it
}

func (s *streamSink) add(data []byte, last bool) error {
	s.waits = true
	s.ended = last
	return s.Write(data, last, s.timeout)
}

func (s *streamSink) flush() error {
	s.waits = false
	s.Flush()
	return s.Err()
}

func (s *streamSink) pending() bool { return s.waits }

func (s *streamSink) finish(trailers []http1.Field) error {
	if s.ended {
		return s.written()
	}
	var block *http2.Encoder
	if s.w.Trailers(trailers); len(s.w.Block) > 0 {
		block = &s.w.Encoder
	}
	err := s.End(block)
	if s.w.Block = s.w.Block[:0]; err != nil {
		return err
	}
	return s.written()
}

// written has the end be written, unless Close does it.
func (s *streamSink) written() error {
	if s.closes {
		s.waits = false
		return s.Err()
	}
	return s.flush()
}

// Which end of a pump has failed.
var (
	errSource = errors.New("cannot read a body")
	errSink   = errors.New("cannot write a body")
	// errBody means that a body is longer than the Service lets it be.
	errBody = errors.New("the body is too long")
	// errAbandoned means that the rest of a body is not wanted.
	errAbandoned = errors.New("the rest of a body is not wanted")
)

// spliceAt is how much of a body must be left for the kernel to carry it: a pipe costs some system calls.
const spliceAt = 64 << 10

// pump carries a body.
type pump struct {
	to       sink
	from     source
	trailers bool      // pass trailers on
	request  *exchange // withholds some of them; nil if none is withheld
	timeout  time.Duration
	bytes    *atomic.Int64 // of the body
	most     int64         // of them, 0 without a bound
	of       pumping
	copied   *mirrored   // gets what is carried; nil if nothing does
	kept     *retrying   // so does this
	until    time.Time   // the pump ends with an error then, unless it is zero
	came     atomic.Bool // all of the body has come
	ended    atomic.Bool // and was read
	// abandoned is set before the source is woken, which ends the pump.
	abandoned atomic.Bool
}

// pumping is what a body is part of.
type pumping interface {
	// touch is called when something was carried, and waited when nothing has come for a while: its error ends the pump.
	touch()
	waited() error
}

// run carries the body to its end, and calls waited when nothing has come for poll. What was put to p.to before goes out with it.
func (p *pump) run(poll time.Duration) error {
	for !p.from.done() {
		if p.abandoned.Load() {
			return errAbandoned
		}
		if policy.Over(p.until) {
			return errSilent
		}
		data, last, err := p.from.next()
		if err != nil {
			return err
		}
		if len(data) > 0 {
			if n := p.bytes.Add(int64(len(data))); p.most > 0 && n > p.most {
				return errBody
			}
			p.copied.add(data)
			p.kept.add(data)
			if last {
				p.came.Store(true)
			}
			if err := p.to.add(data, last); err != nil {
				return fmt.Errorf("%w: %w", errSink, err)
			}
			p.from.take()
			continue
		}
		if p.from.done() {
			break
		}
		if done, err := p.splice(); done || err != nil {
			if err != nil {
				return err
			}
			continue
		}
		if p.to.pending() {
			if err := p.to.flush(); err != nil {
				return fmt.Errorf("%w: %w", errSink, err)
			}
			p.of.touch()
		}
		switch err := p.from.fill(poll); {
		case err == nil:
			p.of.touch()
		case errors.Is(err, os.ErrDeadlineExceeded):
			if err := p.of.waited(); err != nil {
				return err
			}
		default:
			return fmt.Errorf("%w: %w", errSource, err)
		}
	}
	return p.finish()
}

// finish writes the rest of the output, and the end.
func (p *pump) finish() error {
	p.came.Store(true)
	p.ended.Store(true)
	var fields []http1.Field
	if p.trailers {
		fields = p.from.trailers()
		if p.request != nil {
			withhold(p.request, fields)
		}
	}
	if err := p.to.finish(fields); err != nil {
		return fmt.Errorf("%w: %w", errSink, err)
	}
	return nil
}

// splice has the kernel carry the rest of a body, of which nothing is buffered, if it is long and goes from one socket to
// another. It reports whether it has.
func (p *pump) splice() (bool, error) {
	from, is := p.from.(*wireSource)
	to, too := p.to.(*wireSink)
	if !is || !too || to.to.tcp == nil || from.from.tcp == nil || p.copied.wants() || p.kept.wants() {
		return false, nil
	}
	left, ok := from.body.Sized()
	if !ok || left < spliceAt {
		return false, nil
	}
	return true, p.carryBySplice(&from.body, from.from, to.to, left)
}

func (p *pump) carryBySplice(body *http1.Body, from, to *wire, left uint64) error {
	if err := to.flush(p.timeout); err != nil {
		return fmt.Errorf("%w: %w", errSink, err)
	}
	round := p.timeout / 4
	last := time.Now()
	to.written = true
	for left > 0 {
		if p.abandoned.Load() {
			return errAbandoned
		}
		now := time.Now()
		// All that was read is written before the next look at the clock: see idleness.
		from.readBy, to.writeBy = now.Add(round), now.Add(p.timeout+2*round)
		if err := errors.Join(from.conn.SetReadDeadline(from.readBy), to.conn.SetWriteDeadline(to.writeBy)); err != nil {
			return err
		}
		n, err := to.tcp.ReadFrom(&io.LimitedReader{R: from.tcp, N: int64(left)}) //nolint:gosec // of at most 18 digits
		if n > 0 {
			last = time.Now()
			p.of.touch()
			p.bytes.Add(n)
			left -= uint64(n)
			body.Skip(uint64(n))
		}
		switch {
		case left == 0:
		case err == nil:
			return fmt.Errorf("%w: %w", errSource, io.ErrUnexpectedEOF)
		case !errors.Is(err, os.ErrDeadlineExceeded):
			return fmt.Errorf("%w: %w", errSource, err)
		case time.Since(last) >= p.timeout:
			return fmt.Errorf("%w: %w", errSource, stream.ErrIdle)
		}
	}
	return nil
}
